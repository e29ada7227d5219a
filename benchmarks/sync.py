"""Weight sync: seconds and bytes from the trainer to each rank's engine, beside a memcpy of the same weights.

    python benchmarks/sync.py --hf models/SmolLM2-135M-Instruct               # one process
    python benchmarks/sync.py --random 1000 --bucket 64                       # a model of 1000 MB
    torchrun --nproc-per-node 2 benchmarks/sync.py --hf … --pp 2              # or --tp 2; neither: two replicas
    torchrun --nproc-per-node 2 benchmarks/sync.py --hf … --pp 2 --engine sglang --engine-tp 2

What is measured alternates: a memcpy of every tensor; the sync, without and with checksums
(`rollout.check_weight_sync`); and its parts: buckets that nobody takes, the trainer's checksums, and the engine put to
sleep and woken, in which the transformers engine lays packed copies of its weights out, as it does after a sync. The
best round of each counts; all ranks start together and the slowest one's time is taken. Memory is what this process has
more than before the first sync, on a rank whose engine takes nothing yet.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from megarl import platform
from megarl.config.layout import Layout
from megarl.config.schema import RolloutConfig
from megarl.models.bridge import read_hf_config
from megarl.models.build import build_model
from megarl.parallel.groups import Groups, build_groups
from megarl.rollout.engine import Engine
from megarl.rollout.sglang.options import EngineSettings
from megarl.rollout.sglang_engine import make_sglang_engine
from megarl.rollout.transformers_engine import TransformersEngine
from megarl.trainers.sync import plan_sync, sync_weights
from megarl.weights.load_hf import load_hf


def seconds_of(work: Callable[[], object]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def write_random(folder: Path, megabytes: int, dtype: torch.dtype) -> Path:
    """A Llama of about `megabytes`, with 16 layers and random weights."""
    hidden = 128
    config = lambda width: transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=16,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=2048,
    )
    size = lambda width: (2 * 32000 * width + 16 * 16 * width * width) * dtype.itemsize
    while size(hidden + 128) < megabytes * 1e6:
        hidden += 128  # an even number of heads, for TP2
    transformers.AutoModelForCausalLM.from_config(config(hidden), dtype=dtype).save_pretrained(folder)
    return folder


def make_engine(name: str, folder: Path, dtype: torch.dtype, rank: int, engine_tp: int) -> Engine:
    if name == "transformers":
        return TransformersEngine(folder, dtype=dtype, max_num_seqs=1)
    settings = EngineSettings(
        model_path=str(folder),
        dtype=str(dtype).removeprefix("torch."),
        max_tokens=1024,
        max_num_seqs=1,
        gpu_memory_utilization=0.5,
        seed=0,
        options={},
    )
    return make_sglang_engine(settings, rank, engine_tp)


def current_memory() -> int:
    """Bytes that this process holds: of tensors on a GPU, of everything on a CPU."""
    if not platform.current().is_cpu:
        return torch.cuda.memory_allocated()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", type=Path, help="a Hugging Face folder")
    source.add_argument("--random", type=int, metavar="MB", help="a random model of this size")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--engine", default="transformers", choices=("transformers", "sglang"))
    parser.add_argument("--engine-tp", type=int, default=1, help="rollout.tensor_model_parallel_size")
    parser.add_argument("--bucket", type=int, help="rollout.update_weights_bucket_megabytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rank, world_size = platform.init_distributed()
    groups = build_groups(Layout(world_size=world_size, tp=arguments.tp, pp=arguments.pp), seed=1)
    dtype = platform.parse_dtype(arguments.dtype)
    with tempfile.TemporaryDirectory(prefix="megarl-sync-") as temporary:
        folder = arguments.hf
        if folder is None:
            shared = [temporary]
            dist.broadcast_object_list(shared)
            folder = Path(shared[0])
            if rank == 0:
                write_random(folder, arguments.random, dtype)
            dist.barrier()
        result = measure(arguments, folder, groups, dtype)
        dist.barrier()
    if rank == 0 and arguments.json:
        arguments.json.write_text(json.dumps(result))
    platform.shutdown_distributed()


def measure(arguments: argparse.Namespace, folder: Path, groups: Groups, dtype: torch.dtype) -> dict:
    model = build_model(read_hf_config(folder), groups, dtype=dtype, overrides={"use_cpu_initialization": False})
    load_hf(model, folder)
    engine = make_engine(arguments.engine, folder, dtype, groups.rank, arguments.engine_tp)
    start = time.perf_counter()
    rollout = RolloutConfig(
        engine=arguments.engine,
        tensor_model_parallel_size=arguments.engine_tp,
        update_weights_bucket_megabytes=arguments.bucket,
    )
    stream = plan_sync(model, rollout)
    planning = time.perf_counter() - start
    before, highest = current_memory(), 0
    for _ in stream.buckets(None):
        highest = max(highest, current_memory())
    traffic = stream.traffic
    source = torch.ones(traffic.taken, dtype=torch.uint8)
    target = torch.empty_like(source)

    def buckets_alone() -> None:
        for _ in stream.buckets(None):
            pass

    def relayout() -> None:
        engine.sleep()
        engine.wake()

    sides = {
        "memcpy": lambda: target.copy_(source),
        "buckets alone": buckets_alone,
        "checksums of the trainer": stream.checksums,
        "sleep and wake": relayout,
        "sync": lambda: sync_weights(stream, engine, 1, check=False),
        "sync with checksums": lambda: sync_weights(stream, engine, 1, check=True),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds + 1):
        for name, work in sides.items():
            times[name].append(seconds_of(work))
    # The first round touches new memory.
    best = {name: min(values[1:]) for name, values in times.items()}
    if groups.rank == 0:
        print(
            f"{groups.layout.describe()}, {arguments.engine} engine of TP{arguments.engine_tp}: "
            f"{traffic.taken / 1e6:.0f} MB to each rank's engine in {traffic.buckets} buckets, "
            f"{traffic.received / 1e6:.0f} MB of it from other ranks; planned in {planning:.2f} s"
        )
        print(
            f"memory of a sync: {(highest - before) / 1e6:.0f} MB measured; bucket {traffic.bucket_bytes / 1e6:.0f} MB "
            f"and messages {traffic.staging_bytes / 1e6:.0f} MB planned"
        )
        for name, seconds in best.items():
            ratio = seconds / best["memcpy"]
            speed = traffic.taken / seconds / 1e6
            print(f"{name:>25}  {1e3 * seconds:8.1f} ms  {speed:8.0f} MB/s  {ratio:5.2f} × the memcpy")
    if arguments.engine == "sglang":
        engine.close()
    return {"bytes": traffic.taken, "received": traffic.received, "seconds": best, "memory": highest - before}


if __name__ == "__main__":
    main()
