"""Log-probs and entropy, forward and backward: time and peak memory beside log_softmax and cross_entropy.

    python benchmarks/logprobs.py [--tokens 2048] [--vocab 32768 151936] [--rounds 5] [--json]

Time: the variants alternate in one process and the best round of each counts, so that whatever else the machine does
hits them alike. Peak memory: each variant in a process of its own, the highest resident size (VmHWM) above what the
process held once the logits existed. The logits themselves are therefore not in it, and their gradient is, where it
takes memory of its own. Linux only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.logprobs import vocab_parallel_logprobs_entropy


def megarl(logits: Tensor, targets: Tensor) -> Tensor:
    logprobs, entropy = vocab_parallel_logprobs_entropy(logits, targets, vocab_size=logits.shape[1])
    return logprobs.sum() + entropy.sum()


def megarl_without_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    logprobs, _ = vocab_parallel_logprobs_entropy(logits, targets, vocab_size=logits.shape[1], entropy=False)
    return logprobs.sum()


def log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    log_p = F.log_softmax(logits.float(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(1, targets.unsqueeze(1)).sum() + entropy.sum()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy(logits.float(), targets, reduction="none").sum()


PAIRS = {"with entropy": (megarl, log_softmax), "log-probs only": (megarl_without_entropy, cross_entropy)}
"""What each variant of megarl is to be compared with: the plain way to the same result."""


class _Logits(torch.autograd.Function):
    """Stands for the output layer: it keeps nothing, so the memory measured is that of the log-probs alone."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[:1, :1].float().sum(), None


def _run(variant: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor) -> None:
    trigger = torch.zeros((), requires_grad=True)
    variant(_Logits.apply(trigger, logits), targets).backward()


def _seconds(variants: tuple[Callable[..., Tensor], ...], logits: Tensor, targets: Tensor, rounds: int) -> list[float]:
    best = [float("inf")] * len(variants)
    for _ in range(rounds + 1):
        for index, variant in enumerate(variants):
            logits.normal_()  # megarl leaves the gradient in it
            start = time.perf_counter()
            _run(variant, logits, targets)
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def _peak_bytes(variant: Callable[..., Tensor], tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    # A pool of one fresh process: VmHWM only ever rises, so no other variant may have run in it.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_in_this_process, (variant, tokens, vocabulary, dtype))


def _peak_in_this_process(variant: Callable[..., Tensor], tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    small = torch.randn(64, 1024).to(dtype)
    _run(variant, small, torch.zeros(64, dtype=torch.int64))  # what torch loads and allocates once is not counted
    logits = torch.empty(tokens, vocabulary, dtype=dtype)
    logits.normal_()  # in place: a temporary here would raise the high-water mark
    before = _status_bytes("VmRSS")
    _run(variant, logits, torch.arange(tokens) % vocabulary)
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def measure(tokens: int, vocabulary: int, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """One record for each pair of variants: seconds and peak bytes of both, and megarl's ratio to the other."""
    logits = torch.empty(tokens, vocabulary, dtype=dtype)
    targets = torch.arange(tokens) % vocabulary
    records = []
    for name, pair in PAIRS.items():
        seconds = _seconds(pair, logits, targets, rounds)
        peaks = [_peak_bytes(variant, tokens, vocabulary, dtype) for variant in pair]
        records.append(
            {
                "case": name,
                "tokens": tokens,
                "vocabulary": vocabulary,
                "dtype": str(dtype).removeprefix("torch."),
                "beside": pair[1].__name__,
                "seconds": seconds,
                "peak_extra_bytes": peaks,
                "time_ratio": seconds[0] / seconds[1],
                "memory_ratio": peaks[0] / peaks[1],
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768, 151936])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON record a line instead of the table")
    options = parser.parse_args()
    if not options.json:
        print(f"{'tokens × vocabulary':>20}  {'dtype':8}  {'case':14}  {'beside':13}  "
              f"{'ms':>13}  {'ratio':>5}  {'peak extra MiB':>15}  {'ratio':>6}")  # fmt: skip
    for vocabulary in options.vocab:
        for dtype in options.dtype:
            for record in measure(options.tokens, vocabulary, getattr(torch, dtype), options.rounds):
                print(json.dumps(record) if options.json else _row(record), flush=True)


def _row(record: dict[str, Any]) -> str:
    milliseconds = " / ".join(f"{1e3 * value:.0f}" for value in record["seconds"])
    mebibytes = " / ".join(f"{value / 2**20:.0f}" for value in record["peak_extra_bytes"])
    size = f"{record['tokens']:,} × {record['vocabulary']:,}"
    return (
        f"{size:>20}  {record['dtype']:8}  {record['case']:14}  {record['beside']:13}  "
        f"{milliseconds:>13}  {record['time_ratio']:5.2f}  {mebibytes:>15}  {record['memory_ratio']:6.3f}"
    )


if __name__ == "__main__":
    main()
