"""Length balancing: time and imbalance on lognormal lengths, beside dealing out longest first; padding of whole steps.

    python benchmarks/balance.py [--rounds 5] [--json]

The methods alternate and the best round of each counts; max/mean is deterministic (seeded lengths). `bound` is what no
assignment can beat: the mean, or the longest sequence with the companions it must have.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import time
from collections.abc import Callable
from typing import Any

from megarl.config.layout import Layout
from megarl.config.model_shape import ModelShape
from megarl.parallel.balance import pack, partition, sequence_flops
from megarl.trainers.minibatch import plan_packs

SIZES = [(4096, 64), (4096, 8), (1024, 128), (512, 8), (16384, 512)]
MICRO_BATCHES = [(512, 16384), (512, 8192), (4096, 16384)]
LONGEST = 8192

STEPS = [
    Layout(world_size=4),
    Layout(world_size=16, tp=4),
    Layout(world_size=16, pp=4),
    Layout(world_size=32, tp=2, pp=2, cp=2),
]
"""Each with 4 data-parallel ranks."""
STEP_SAMPLES, STEP_MICRO_BATCH = 512, 16384

QWEN3_8B = ModelShape(
    model_type="qwen3",
    num_layers=36,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=12288,
    num_dense_layers=36,
    vocab_size=151936,
    max_positions=40960,
    tied=False,
)


def lognormal_lengths(count: int) -> list[int]:
    """Seeded lengths in tokens: median 403, a long tail, cut at LONGEST."""
    rng = random.Random(count)
    return [min(max(int(rng.lognormvariate(6, 1)), 1), LONGEST) for _ in range(count)]


def longest_first(costs: list[int], parts: int, *, equal_counts: bool) -> list[list[int]]:
    """The plain way: each item, longest first, to the lightest part that may still take one."""
    capacity = len(costs) // parts if equal_counts else len(costs)
    result: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        total, part = heapq.heappop(heap)
        result[part].append(index)
        if len(result[part]) < capacity:
            heapq.heappush(heap, (total + costs[index], part))
    return result


def _measure_partition(count: int, parts: int, equal_counts: bool, rounds: int) -> dict[str, Any]:
    costs = lognormal_lengths(count)
    mean = sum(costs) / parts
    methods: dict[str, Callable[..., list[list[int]]]] = {"megarl": partition, "longest first": longest_first}
    record: dict[str, Any] = {"items": count, "parts": parts, "equal_counts": equal_counts}
    for _ in range(rounds):
        for name, method in methods.items():
            start = time.perf_counter()
            result = method(costs, parts, equal_counts=equal_counts)
            seconds = time.perf_counter() - start
            best = min(seconds, record.get(name, {"seconds": math.inf})["seconds"])
            largest = max(sum(costs[index] for index in part) for part in result)
            record[name] = {"seconds": best, "max_over_mean": largest / mean}
    companions = sum(sorted(costs)[: count // parts - 1]) if equal_counts else 0
    record["bound"] = max(1.0, (max(costs) + companions) / mean)
    return record


def _measure_pack(count: int, max_tokens: int, rounds: int) -> dict[str, Any]:
    lengths = lognormal_lengths(count)
    seconds = math.inf
    for _ in range(rounds):
        start = time.perf_counter()
        packed = pack(lengths, max_tokens)
        seconds = min(seconds, time.perf_counter() - start)
    sums = [sum(lengths[index] for index in part) for part in packed]
    return {
        "sequences": count,
        "max_tokens": max_tokens,
        "micro_batches": len(packed),
        "bound": math.ceil(sum(lengths) / max_tokens),
        "fill": sum(sums) / len(packed) / max_tokens,
        "max_over_mean": max(sums) * len(sums) / sum(sums),
        "seconds": seconds,
    }


def _measure_step(layout: Layout) -> dict[str, Any]:
    """A whole step as the trainer shares it out: work over data-parallel ranks, and padding in their micro-batches."""
    lengths = lognormal_lengths(STEP_SAMPLES)
    costs = [sequence_flops(length, QWEN3_8B) for length in lengths]
    parts = partition(costs, layout.dp, equal_counts=False)
    work = [sum(costs[i] for i in part) for part in parts]
    plans = [plan_packs([lengths[i] for i in part], layout, max_tokens=STEP_MICRO_BATCH) for part in parts]
    most = max(len(sizes) for _, sizes in plans)
    plans = [
        plan_packs([lengths[i] for i in part], layout, max_tokens=STEP_MICRO_BATCH, at_least=most) for part in parts
    ]
    padded = sum(sum(sizes) for _, sizes in plans)
    return {
        "layout": layout.describe(),
        "micro_batches": most,
        "padding": 1 - sum(lengths) / padded,
        "max_over_mean": max(work) * len(work) / sum(work),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON record a line instead of the tables")
    options = parser.parse_args()
    partitions = [
        _measure_partition(count, parts, equal_counts, options.rounds)
        for count, parts in SIZES
        for equal_counts in (False, True)
    ]
    packs = [_measure_pack(count, max_tokens, options.rounds) for count, max_tokens in MICRO_BATCHES]
    steps = [_measure_step(layout) for layout in STEPS]
    if options.json:
        print("\n".join(json.dumps(record) for record in partitions + packs + steps))
        return
    print(f"{'items → parts':>14}  {'counts':6}  {'bound':>8}  {'megarl':>20}  {'longest first':>20}   max/mean, ms")
    for record in partitions:
        cells = [
            f"{record[name]['max_over_mean']:.6f}  {1e3 * record[name]['seconds']:7.1f}"
            for name in ("megarl", "longest first")
        ]
        sizes = f"{record['items']} → {record['parts']}"
        counts = "equal" if record["equal_counts"] else "free"
        print(f"{sizes:>14}  {counts:6}  {record['bound']:8.6f}  {cells[0]:>20}  {cells[1]:>20}")
    print(f"\n{'sequences':>9}  {'max tokens':>10}  {'micro-batches':>13}  {'bound':>5}  {'fill':>6}  max/mean      ms")
    for record in packs:
        print(
            f"{record['sequences']:>9}  {record['max_tokens']:>10}  {record['micro_batches']:>13}  "
            f"{record['bound']:>5}  {record['fill']:6.1%}  {record['max_over_mean']:8.4f}  "
            f"{1e3 * record['seconds']:6.1f}"
        )
    print(
        f"\n{STEP_SAMPLES} samples in micro-batches of {STEP_MICRO_BATCH} tokens, work by the FLOPs of qwen3-8B\n"
        f"{'layout':>42}  {'micro-batches a rank':>20}  {'padding':>7}  work max/mean"
    )
    for record in steps:
        print(
            f"{record['layout']:>42}  {record['micro_batches']:>20}  {record['padding']:7.2%}  "
            f"{record['max_over_mean']:13.5f}"
        )


if __name__ == "__main__":
    main()
