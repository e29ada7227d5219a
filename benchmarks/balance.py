"""Length balancing: time and imbalance on lognormal lengths, beside dealing out longest first.

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

from megarl.parallel.balance import pack, partition

SIZES = [(4096, 64), (4096, 8), (1024, 128), (512, 8), (16384, 512)]
MICRO_BATCHES = [(512, 16384), (512, 8192), (4096, 16384)]
LONGEST = 8192


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
    if options.json:
        print("\n".join(json.dumps(record) for record in partitions + packs))
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


if __name__ == "__main__":
    main()
