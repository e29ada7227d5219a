"""The optimizer's state: float32 weights and moments, in any layout, with the distributed optimizer or without.

optimizer/
  optimizer.json          how many steps it has made
  .metadata, *.distcp     param.<name>, exp_avg.<name>, exp_avg_sq.<name> in the shapes of the model's tensors (`boxes`)

Learning rate, weight decay, betas and the like are the config's to say, and are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megarl import platform
from megarl.checkpoint.boxes import BoxSavePlanner, BoxTensor, box_tensors, read_boxes
from megarl.checkpoint.dist_format import damaged
from megarl.checkpoint.staged import HostMemory, StagedWrite, stage_planned
from megarl.config.errors import ConfigError
from megarl.models.train import TrainableModel
from megarl.weights.together import SharedOutcome, found_by, on_first_rank

_FACTS_NAME = "optimizer.json"
_KINDS = ("param", "exp_avg", "exp_avg_sq")


def stage_optimizer(trainable: TrainableModel, folder: Path, memory: HostMemory | None) -> StagedWrite:
    """Prepares writing the state into `folder`, an existing empty folder. Collective over the world.

    Args:
        memory: to take the values now; without it they are read when they are written.

    Raises:
        ConfigError: on every rank; rank 0 cannot write.
    """
    _allocate(trainable)
    steps = _steps(trainable)
    outcome = SharedOutcome()
    with outcome.attempt(folder):
        if dist.get_rank() == 0:
            (folder / _FACTS_NAME).write_text(json.dumps({"steps": steps}) + "\n", encoding="utf-8")
    outcome.check()
    return stage_planned(BoxSavePlanner(list(_boxes(trainable, to_write=True))), folder, {}, memory)


def read_optimizer(trainable: TrainableModel, folder: Path) -> None:
    """Restores the state from `folder`, whatever layout wrote it. Collective over the world.

    The float32 weights come along, so a model in bfloat16 goes on from what the optimizer had.

    Raises:
        ConfigError: on every rank; the folder is missing or damaged, or of another model.
    """
    _allocate(trainable)
    try:
        steps = on_first_rank(lambda: _read_steps(folder))
        read_boxes(list(_boxes(trainable, to_write=False)), folder)
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        what = f"{folder}: {failure}" if isinstance(failure, ConfigError) else damaged(folder, failure)
        raise ConfigError(what + found_by(rank)) from None
    _set_steps(trainable, steps)


def _read_steps(folder: Path) -> int:
    try:
        return int(json.loads((folder / _FACTS_NAME).read_text(encoding="utf-8"))["steps"])
    except (ValueError, TypeError, KeyError) as error:  # ValueError: neither JSON nor text
        raise ConfigError(damaged(folder / _FACTS_NAME, error)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """What this rank's optimizer has of one parameter: a range of its elements, in row-major order."""

    parameter: torch.Tensor
    """The model's."""
    start: int
    tensors: dict[str, torch.Tensor]
    """[elements] each, float32, by _KINDS: the optimizer's own, not copies."""
    is_divided: bool
    """Whether data-parallel ranks hold different ranges; if not, they hold the same."""


def _boxes(trainable: TrainableModel, *, to_write: bool) -> Iterator[BoxTensor]:
    """Everything that this rank holds, or what of it this rank is the one to write."""
    places = _places(trainable)
    for held in _held(trainable):
        for place in places[held.parameter]:
            if to_write and not _is_writer(place.replica_id, held.is_divided):
                continue
            # Where a parameter is stored as several tensors, each is some of its rows: data of the same memory.
            first = (place.data.data_ptr() - held.parameter.data_ptr()) // held.parameter.element_size()
            assert place.data.is_contiguous()
            size = next(iter(held.tensors.values())).numel()
            start = max(held.start, first)
            stop = min(held.start + size, first + place.data.numel())
            for kind, tensor in held.tensors.items() if start < stop else ():
                yield from box_tensors(
                    f"{kind}.{place.key}",
                    tensor[start - held.start : stop - held.start],
                    start=start - first,
                    local_shape=place.local_shape,
                    shape=place.global_shape,
                    offsets=place.global_offset,
                    may_lack_rows=place.allow_shape_mismatch,
                )


def _places(trainable: TrainableModel) -> dict[torch.Tensor, list[ShardedTensor]]:
    """Of each parameter, which parts of which of the model's tensors it is."""
    metadata = {"dp_cp_group": trainable.model.groups.dp_cp}
    found: dict[torch.Tensor, list[ShardedTensor]] = {}
    for chunk in trainable.model.chunks:
        for stored in nested_values(chunk.sharded_state_dict(metadata=metadata)):
            if isinstance(stored, ShardedTensorFactory):
                found[stored.data] = [each for each in nested_values(stored.build()) if isinstance(each, ShardedTensor)]
            elif isinstance(stored, ShardedTensor):
                found[stored.data] = [stored]
    return found


def _is_writer(replica_id: Any, is_divided: bool) -> bool:
    """Whether this rank is the first of those that hold the same.

    Args:
        replica_id: Megatron-Core's; the last number counts data-parallel ranks.
    """
    numbers = replica_id if isinstance(replica_id, tuple) else (replica_id,)
    return not any(numbers[:-1] if is_divided else numbers)


def _held(trainable: TrainableModel) -> Iterator[_Held]:
    for part in _parts(trainable):
        if isinstance(part, DistributedOptimizer):
            for parameter in part.model_param_group_index_map:
                tensors = part._get_main_param_and_optimizer_states(parameter)
                start = part._get_model_param_range_map(parameter)["param"].start
                yield _Held(parameter=parameter, start=start, tensors=_flat(tensors), is_divided=True)
            continue
        # Parameters of 16 bits have a float32 copy, which is what the optimizer knows.
        parameters = [parameter for chunk in trainable.model.chunks for parameter in chunk.parameters()]
        models = {getattr(parameter, "main_param", parameter): parameter for parameter in parameters}
        for main in (each for group in part.optimizer.param_groups for each in group["params"]):
            tensors = {"param": main, **part.optimizer.state[main]}
            yield _Held(parameter=models[main], start=0, tensors=_flat(tensors), is_divided=False)


def _flat(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {kind: tensors[kind].detach().view(-1) for kind in _KINDS}


def _parts(trainable: TrainableModel) -> list[Any]:
    """Megatron-Core's optimizers: one for dense parameters, and one for experts."""
    parts = getattr(trainable.optimizer, "chained_optimizers", [trainable.optimizer])
    return [part for part in parts if part.optimizer is not None]  # None: no parameter of its kind on this rank


def _allocate(trainable: TrainableModel) -> None:
    """Makes the state that the first step would make: a checkpoint may come before it, as of an actor that waits."""
    for part in _parts(trainable):
        part.init_state_fn(part.optimizer, part.config)
        for state in part.optimizer.state.values() if isinstance(part.optimizer, torch.optim.Adam) else ():
            state.setdefault("step", torch.zeros(()))


def _steps(trainable: TrainableModel) -> int:
    """Steps that the optimizer has made. Collective over the world: a rank may hold no parameter."""
    steps = [0]
    for part in _parts(trainable):
        # torch's Adam counts for each parameter, Transformer Engine's for a group of them.
        counts = [*part.optimizer.state.values(), *part.optimizer.param_groups]
        steps += [int(count["step"]) for count in counts if "step" in count]
    most = torch.tensor(max(steps), device=platform.current().device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def _set_steps(trainable: TrainableModel, steps: int) -> None:
    for part in _parts(trainable):
        if isinstance(part.optimizer, torch.optim.Adam):
            for state in part.optimizer.state.values():
                state["step"].fill_(steps)
        elif steps:
            for group in part.optimizer.param_groups:
                group["step"] = steps
