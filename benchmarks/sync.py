"""Weight sync: seconds and bytes from the trainer to each rank's engine, beside a memcpy of the same weights.

    python benchmarks/sync.py --hf models/SmolLM2-135M-Instruct                                  # one process
    torchrun --nproc-per-node 2 benchmarks/sync.py --hf models/SmolLM2-135M-Instruct --tp 1      # DP2; --tp 2, --pp 2

The three alternate: a memcpy of every tensor, the sync, and the sync with a checksum of each tensor on both sides
(`rollout.check_weight_sync`). The best round of each counts; all ranks start together and the slowest one's time is
taken.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config.layout import Layout
from megarl.models.bridge import read_hf_config
from megarl.models.build import build_model
from megarl.parallel.groups import build_groups
from megarl.rollout.transformers_engine import TransformersEngine
from megarl.trainers.sync import sync_weights
from megarl.weights.export_hf import plan_export
from megarl.weights.load_hf import load_hf


def seconds_of(work: Callable[[], object]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rank, world_size = platform.init_distributed()
    groups = build_groups(Layout(world_size=world_size, tp=arguments.tp, pp=arguments.pp), seed=1)
    dtype = platform.parse_dtype(arguments.dtype)
    model = build_model(read_hf_config(arguments.hf), groups, dtype=dtype, overrides={"use_cpu_initialization": False})
    load_hf(model, arguments.hf)
    engine = TransformersEngine(arguments.hf, dtype=dtype, max_num_seqs=1)
    plan = plan_export(model)
    source = [torch.ones(info.shape, dtype=info.dtype) for info in plan.tensors.values()]
    target = [torch.empty_like(tensor) for tensor in source]

    def memcpy() -> None:
        for to, tensor in zip(target, source, strict=True):
            to.copy_(tensor)

    sides = {
        "memcpy": memcpy,
        "sync": lambda: sync_weights(model, plan, engine, 1, check=False),
        "sync with checksums": lambda: sync_weights(model, plan, engine, 1, check=True),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds + 1):
        for name, work in sides.items():
            times[name].append(seconds_of(work))
    # The first round touches new memory.
    best = {name: min(values[1:]) for name, values in times.items()}
    size = sum(info.num_bytes for info in plan.tensors.values())
    if rank == 0:
        print(f"{groups.layout.describe()}: {size / 2**20:.0f} MiB in {len(plan.tensors)} tensors to each engine")
        for name, seconds in best.items():
            ratio = seconds / best["memcpy"]
            print(f"{name:>20}  {1e3 * seconds:8.1f} ms  {size / seconds / 1e9:6.2f} GB/s  {ratio:5.2f} × the memcpy")
        if arguments.json:
            arguments.json.write_text(json.dumps({"bytes": size, "seconds": best}))
    platform.shutdown_distributed()


if __name__ == "__main__":
    main()
