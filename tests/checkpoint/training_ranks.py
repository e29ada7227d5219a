"""What the ranks of the tests of a run's checkpoints do. Each function runs on every rank of a world."""

from __future__ import annotations

import contextlib
import logging
import resource
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl import platform

platform.current()  # prepares Megatron-Core before anything imports it
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

from megarl.checkpoint.file_list import damage_of  # noqa: E402
from megarl.checkpoint.staged import StagedWrite  # noqa: E402
from megarl.checkpoint.training import CopyMemory, SavedModel, begin_checkpoint, load_checkpoint  # noqa: E402
from megarl.config.errors import ConfigError  # noqa: E402
from megarl.config.layout import Layout  # noqa: E402
from megarl.config.schema_learning import OptimConfig  # noqa: E402
from megarl.models.bridge import read_hf_config  # noqa: E402
from megarl.models.build import build_model  # noqa: E402
from megarl.models.outputs import token_logprobs  # noqa: E402
from megarl.models.train import TrainableModel, optimizer_config  # noqa: E402
from megarl.parallel.groups import Groups, build_groups  # noqa: E402
from megarl.weights.export_hf import export_hf  # noqa: E402
from megarl.weights.load_hf import load_hf  # noqa: E402
from tests.distributed.train_step import global_batch, micro_batches  # noqa: E402
from tests.launch import LIMIT_S  # noqa: E402


class Learner:
    """A model that learns one batch by heart, step by step."""

    def __init__(self, hf: Path, groups: Groups, *, distributed: bool, dtype: torch.dtype = torch.float32) -> None:
        self.model = build_model(read_hf_config(hf), groups, dtype=dtype)
        load_hf(self.model, hf)
        optimizer = optimizer_config(
            OptimConfig(lr=1e-3, eps=1e-4, weight_decay=0.1), dtype, use_distributed_optimizer=distributed
        )
        self.trainable = TrainableModel(self.model, optimizer)
        self.saved = SavedModel(trainable=self.trainable, source_hf=hf)
        sequences = global_batch(self.model.vocab_size)
        self._batches = micro_batches(sequences, groups, 2)
        self._total = sum(len(sequence) - 1 for sequence in sequences)

    def step(self) -> None:
        def loss(logits: torch.Tensor, shard: Any) -> tuple[torch.Tensor, dict]:
            logprobs, _ = token_logprobs(self.model, logits, shard)
            return -logprobs[shard.targets >= 0].sum() / self._total, {}

        assert self.trainable.step(self._batches, loss).updated

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in export_hf(self.model)}


def is_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@contextlib.contextmanager
def writes_that_wait() -> Iterator[threading.Event]:
    """Holds the writing of tensors back until the event is set."""
    event, write = threading.Event(), StagedWrite.write

    def wait_and_write(staged: StagedWrite) -> None:
        assert event.wait(LIMIT_S)
        write(staged)

    StagedWrite.write = wait_and_write  # type: ignore[method-assign]
    try:
        yield event
    finally:
        StagedWrite.write = write  # type: ignore[method-assign]


def save_while_training(hf: Path, folder: Path, cases: dict[str, dict]) -> dict[str, dict[str, bool]]:
    """A checkpoint after one step, written when the weights have moved on already; then a second step from it."""
    found = {}
    for name, case in cases.items():
        groups = build_groups(Layout(world_size=dist.get_world_size(), **case["layout"]))
        settings = {"distributed": case["distributed"], "dtype": case.get("dtype", torch.float32)}
        learner = Learner(hf, groups, **settings)
        memory = CopyMemory()
        # One before, so that its memory is used again.
        begin_checkpoint(learner.saved, folder / f"{name} before", {"step": 0}, {}, memory=memory).finish()
        learner.step()
        after_one = learner.weights()
        with writes_that_wait() as may_write:
            write = begin_checkpoint(
                learner.saved, folder / name, {"step": 1}, {}, memory=memory, export_hf=case.get("export", False)
            )
            was_written = write.is_written()
            learner.step()
            after_two = learner.weights()
            may_write.set()
            write.finish()
        fresh = Learner(hf, groups, **settings)
        load_checkpoint(fresh.trainable, folder / name, {})
        loaded = fresh.weights()
        fresh.step()
        found[name] = {
            "written when training went on": was_written,
            "moved": not is_equal(after_one, after_two),
            "the step's weights": is_equal(loaded, after_one),
            "same next step": is_equal(fresh.weights(), after_two),
            "undamaged": damage_of(folder / name, contents=True) is None,
        }
    return found


def save_where_a_file_cannot_grow(hf: Path, folder: Path, in_background: bool, limit_bytes: int) -> str:
    """What a save says if rank 1 cannot write more than so many bytes into a file."""
    groups = build_groups(Layout(world_size=dist.get_world_size(), tp=2))
    learner = Learner(hf, groups, distributed=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        begin_checkpoint(
            learner.saved, folder, {"step": 1}, {}, memory=CopyMemory() if in_background else None
        ).finish()
    except ConfigError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "nothing was wrong"


RESHARDED: dict[str, tuple[str, dict, bool, dict, bool]] = {
    "DP2 to TP2, without the distributed optimizer": ("llama", {}, True, {"tp": 2}, False),
    "TP2 to PP2, with the distributed optimizer": ("llama", {"tp": 2}, False, {"pp": 2}, True),
    "tied, PP2 to DP2": ("qwen2_tied", {"pp": 2}, True, {}, True),
    "mixture, EP2 to PP2": ("qwen3_moe", {"ep": 2}, True, {"pp": 2}, True),
    "mixture, DP2 to EP2, without the distributed optimizer": ("qwen3_moe", {}, True, {"ep": 2}, False),
}
"""Model, layout and whether the optimizer is distributed, before and after."""


def load_in_another_layout(hf: Path, folder: Path, before: dict, after: dict, was: bool, is_now: bool) -> float:
    """How far the weights are apart after one more step, relative to how far that step moved them."""
    learner = Learner(hf, build_groups(Layout(world_size=dist.get_world_size(), **before)), distributed=was)
    for _ in range(2):
        learner.step()
    begin_checkpoint(learner.saved, folder, {"step": 2}, {}, memory=None).finish()
    moved_from = learner.weights()
    learner.step()
    fresh = Learner(hf, build_groups(Layout(world_size=dist.get_world_size(), **after)), distributed=is_now)
    load_checkpoint(fresh.trainable, folder, {})
    assert is_equal(fresh.weights(), moved_from)
    fresh.step()
    found = fresh.weights()
    return max(
        float((found[name] - tensor).norm() / (tensor - moved_from[name]).norm())
        for name, tensor in learner.weights().items()
    )


FULL = {"at once": (False, 100_000), "in the background": (True, 100_000), "before the tensors": (True, 4096)}
"""How a save meets a full disk: whether it is in the background, and how large rank 1's files may be."""


def everything(models: Path, folder: Path, edits: dict[str, Callable[[Path], None]]) -> dict[str, Any]:
    """All that wants two ranks, in one start of two processes."""
    hf = models / "llama"
    cases = {
        "DP2": {"layout": {}, "distributed": True},
        "TP2": {"layout": {"tp": 2}, "distributed": False},
        "PP2 bfloat16": {"layout": {"pp": 2}, "distributed": True, "dtype": torch.bfloat16, "export": True},
    }
    return {
        **save_while_training(hf, folder, cases),
        **{name: save_where_a_file_cannot_grow(hf, folder / name, *full) for name, full in FULL.items()},
        **{
            name: load_in_another_layout(models / model, folder / name, before, after, was, is_now)
            for name, (model, before, was, after, is_now) in RESHARDED.items()
        },
        **{name: damage_after(folder / "DP2", folder / "damaged" / name, edit) for name, edit in edits.items()},
    }


def damage_after(folder: Path, copy: Path, edit: Callable[[Path], None]) -> list[str | None]:
    """What is said about an edited copy of a checkpoint, with and without comparing checksums."""
    if dist.get_rank() == 0:
        shutil.copytree(folder, copy)
        edit(copy)
    dist.barrier()
    said: list[str | None] = []
    for contents in (True, False):
        try:
            said.append(damage_of(copy, contents=contents))
        except ConfigError as error:
            said.append(f"refused: {error}")
    return said
