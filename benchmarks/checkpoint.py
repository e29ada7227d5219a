"""Checkpoints: how long training stands still for one, beside plain `torch.save` of as many bytes.

    python benchmarks/checkpoint.py --random 50                                # one process, 50 MB of bfloat16 weights
    torchrun --nproc-per-node 2 benchmarks/checkpoint.py --random 50 --tp 2    # neither --tp nor --pp: two replicas

Rounds alternate between `torch.save` (with fsync, of a tensor of the bytes that this rank's checkpoint files have), a
checkpoint that training waits for, and one that is written in the background (`checkpoint.async_save`) while optimizer
steps go on; all with the optimizer's state, checksums, and publication. Of the latter the stall is the time to begin it
and to publish it. The best round of each counts, and of the ranks the slowest. Each save is of a state that no cache of
the page has seen before, onto the disk that --folder is on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sync import write_random

from megarl import platform
from megarl.checkpoint.file_list import damage_of
from megarl.checkpoint.training import CheckpointWrite, CopyMemory, SavedModel, begin_checkpoint
from megarl.config.layout import Layout
from megarl.config.schema_learning import OptimConfig
from megarl.data.packing import pack_multiple, pack_sequences, padded_length
from megarl.models.bridge import read_hf_config
from megarl.models.build import build_model
from megarl.models.outputs import token_logprobs
from megarl.models.train import TrainableModel, optimizer_config
from megarl.parallel.groups import Groups, build_groups
from megarl.weights.load_hf import load_hf

_TOKENS = 64
"""Of the batch of a step, which is there to change the weights."""


class Training:
    """A model and its steps."""

    def __init__(self, hf: Path, groups: Groups) -> None:
        dtype = torch.bfloat16
        self.model = build_model(read_hf_config(hf), groups, dtype=dtype, overrides={"use_cpu_initialization": False})
        load_hf(self.model, hf)
        self.trainable = TrainableModel(
            self.model, optimizer_config(OptimConfig(), dtype, use_distributed_optimizer=True)
        )
        self.memory = CopyMemory()
        self.saved = SavedModel(trainable=self.trainable, source_hf=hf)
        tokens = torch.randint(0, self.model.vocab_size, (_TOKENS,))
        length = padded_length(_TOKENS, pack_multiple(groups.layout))
        pack = pack_sequences([tokens], groups.layout, rows=[0], num_tokens=length)
        self._batch = [pack.shard(groups.cp.size(), groups.cp.rank())]

    def step(self) -> None:
        def loss(logits: torch.Tensor, shard: Any) -> tuple[torch.Tensor, dict]:
            return -token_logprobs(self.model, logits, shard)[0].mean(), {}

        self.trainable.step(self._batch, loss)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slowest rank, and what came out."""
    dist.barrier()
    start = time.perf_counter()
    result = work()
    return slowest(time.perf_counter() - start), result


def slowest(seconds: float) -> float:
    total = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return float(total)


def plain_save(bytes_of_rank: int, folder: Path) -> None:
    """What a loop without any of this would do."""
    file = folder / f"plain-{dist.get_rank()}.pt"
    with file.open("wb") as stream:
        torch.save(torch.zeros(bytes_of_rank, dtype=torch.uint8), stream)
        stream.flush()
        os.fsync(stream.fileno())
    file.unlink()


def wait_for(write: CheckpointWrite, training: Training) -> list[float]:
    """Trains until every rank has written; seconds of the steps meanwhile."""
    steps = []
    while not is_everywhere(write.is_written()):
        steps.append(timed(training.step)[0])
    return steps


def is_everywhere(condition: bool) -> bool:
    flag = torch.tensor(float(condition))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def rank_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"*/__{dist.get_rank()}_*.distcp"))


def measure(training: Training, folder: Path, rounds: int) -> dict[str, float]:
    """The best of each over `rounds`, after one that warms up."""
    measured = [one_round(training, folder) for _ in range(rounds + 1)][1:]
    return {name: min(each[name] for each in measured) for name in measured[0]}


def one_round(training: Training, folder: Path) -> dict[str, float]:
    target = folder / "step-000001"
    step, _ = timed(training.step)
    sync, _ = timed(lambda: save(training, target, in_background=False).finish())
    assert damage_of(target, contents=True) is None
    size = rank_bytes(target)
    remove(target)
    plain, _ = timed(lambda: plain_save(size, folder))
    begin, write = timed(lambda: save(training, target, in_background=True))
    meanwhile = wait_for(write, training)
    publish, _ = timed(write.finish)
    remove(target)
    return {
        "megabytes": slowest(size) / 1e6,
        "plain": plain,
        "sync": sync,
        "begin": begin,
        "publish": publish,
        "async": begin + publish,
        "step": step,
        "step meanwhile": statistics.median(meanwhile or [step]),
    }


def save(training: Training, target: Path, *, in_background: bool) -> CheckpointWrite:
    memory = training.memory if in_background else None
    return begin_checkpoint(training.saved, target, {"step": 1}, {}, memory=memory)


def remove(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, metavar="MB", default=50, help="bfloat16 weights of the model")
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder if not given")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rank, world_size = platform.init_distributed()
    groups = build_groups(Layout(world_size=world_size, tp=arguments.tp, pp=arguments.pp), seed=1)
    with tempfile.TemporaryDirectory(prefix="megarl-checkpoint-", dir=arguments.folder) as temporary:
        shared = [temporary]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        if rank == 0:
            write_random(folder / "model", arguments.random, torch.bfloat16)
        dist.barrier()
        result = measure(Training(folder / "model", groups), folder, arguments.rounds)
        dist.barrier()
    if rank == 0:
        report(result)
        if arguments.json:
            arguments.json.write_text(json.dumps(result))
    platform.shutdown_distributed()


def report(result: dict[str, float]) -> None:
    print(f"{result['megabytes']:.0f} MB on the rank that writes most; load average {os.getloadavg()[0]:.1f}")
    for name, what in (
        ("plain", "torch.save of as many bytes, with fsync"),
        ("sync", "checkpoint that training waits for"),
        ("async", "stall by one that is written in the background"),
        ("begin", "  of it: to begin (plan, gather, copy)"),
        ("publish", "  of it: to publish"),
        ("step", "optimizer step"),
        ("step meanwhile", "optimizer step while a checkpoint is written"),
    ):
        print(f"{result[name]:8.3f} s  {result[name] / result['sync']:7.1%} of sync  {what}")


if __name__ == "__main__":
    main()
