"""Program: builds the modules of every rank of a world without memory and proves that they make up the models.

Usage: python -m megarl.planning.simulated_ranks REQUESTS_JSON ANSWERS_FILE

The only part of planning that imports torch, so `weight_map_run` starts it as a process of its own; Megatron-Core's
state, which is global, ends with it. Modules are on the meta device and collectives are torch's fake ones, which move
nothing: a rank of 512 is built as under torchrun, in a fifth of a second.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl import platform
from megarl.config import ConfigError
from megarl.config.layout import Layout
from megarl.models.bridge import read_hf_config
from megarl.models.build import MegatronModel, Role, build_model
from megarl.parallel.groups import build_groups
from megarl.planning.architecture import Architecture, Head
from megarl.planning.weight_map import Held, Parameter, Piece, RankClass, map_problems, rank_classes
from megarl.weights.architecture_tensors import architecture_tensors
from megarl.weights.pieces import model_shards

_HEADS = {Role.CAUSAL_LM: Head.LOGITS, Role.CRITIC: Head.VALUE, Role.REWARD: Head.SCORE}


def main() -> None:
    """Answers every request: a list of `prove`'s results, in the order of the requests."""
    logging.disable(logging.WARNING)
    # What is imported stays: collections that do not walk it halve the time of a build, and forked processes go on
    # sharing its memory.
    gc.freeze()
    requests, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    answers = [
        prove(Path(request["folder"]), Layout(**request["layout"]), Role(request["role"])) for request in requests
    ]
    file.write_text(json.dumps(answers))


def prove(folder: Path, layout: Layout, role: Role) -> dict[str, Any]:
    """Builds all ranks and compares: what `weight_map_run.WeightMap` holds."""
    start = time.perf_counter()
    try:
        hf_config = read_hf_config(folder)
        held = held_by_ranks(hf_config, layout, role)
        tensors = architecture_tensors(hf_config, role)
    except ConfigError as error:
        return {"problems": error.problems}
    return {
        "problems": map_problems(held, tensors, Architecture.from_hf(folder), layout, _HEADS[role]),
        "tensors": len(tensors),
        "elements": sum(torch.Size(shape).numel() for shape in tensors.values()),
        "built": len(held),
        "largest": max(of_class.numel for of_class in held),
        "seconds": time.perf_counter() - start,
    }


def held_by_ranks(hf_config: transformers.PretrainedConfig, layout: Layout, role: Role) -> list[Held]:
    """What every class of ranks holds, built by several processes."""
    classes = rank_classes(layout)
    build = functools.partial(_held_by_class, hf_config, layout, role)
    processes = min(os.cpu_count() or 1, len(classes), _MOST_PROCESSES)
    at_a_time = min(_CLASSES_AT_A_TIME, math.ceil(len(classes) / processes))
    # Forked, they share the memory of what is imported, which is most of what a process needs.
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(build, classes, chunksize=at_a_time)


_MOST_PROCESSES = 8
"""What each takes besides what it shares adds up."""

_CLASSES_AT_A_TIME = 8
"""That a process builds before it hands them over: few enough to hold little, and to share out evenly."""


def _held_by_class(hf_config: transformers.PretrainedConfig, layout: Layout, role: Role, ranks: RankClass) -> Held:
    with simulated_rank(layout.world_size, ranks.first):
        groups = build_groups(layout)
        with torch.device("meta"):
            model = build_model(hf_config, groups, role=role, device="meta")
        return Held(ranks=ranks, parameters=_parameters(model))


def _parameters(model: MegatronModel) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(
            shard.name,
            tuple(shard.tensor.shape),
            shard.is_copy,
            tuple(Piece(piece.hf_name, piece.hf_shape, piece.hf_box, piece.local_box) for piece in shard.pieces),
        )
        for shard in model_shards(model)
    )


@contextmanager
def simulated_rank(world_size: int, rank: int) -> Iterator[None]:
    """This process is `rank` of a world whose other ranks do not exist; its collectives do nothing.

    Of the process groups only the rank's own are made: those of all 512 ranks would take seconds for each of them.
    """
    from megatron.core import parallel_state

    create_group = parallel_state.create_group

    def create_own_group(ranks: Sequence[int], *, backend: object = None, **options: Any) -> Any:
        # Whatever the backend, a gloo group beside the others too: there is nobody to connect to.
        return create_group(ranks, **options) if rank in ranks else dist.GroupMember.NON_GROUP_MEMBER

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    parallel_state.create_group = create_own_group
    try:
        yield
    finally:
        parallel_state.create_group = create_group
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    # Megatron-Core is prepared for this machine once, before processes are forked.
    platform.current()
    main()
