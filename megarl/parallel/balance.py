"""Length balancing: which sequences go to which rank, and which share a micro-batch.

Sequences of a batch differ in length by orders of magnitude and all ranks wait for the slowest, so the largest part
decides the time of a step. Everything here is plain Python without torch, and deterministic: every rank computes the
same assignment from the same lengths, without being told.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from megarl.config import ModelShape

_Entry = tuple[float, Any]
"""(sum of costs, its items): the items are an index, or a pair of such items, flattened once at the end."""

_ENOUGH = 1e-4
"""Refinement ends when the largest part is within this fraction of the mean: the estimated costs are no better."""

_EXCHANGES_PER_PART = 16
"""Bounds the time of refinement; it is nearly always through much sooner."""


def sequence_flops(length: int, shape: ModelShape) -> int:
    """Floating-point operations of a forward pass over one sequence of `length` tokens, estimated.

    Matrix products grow with the length and causal attention with its square (PaLM, arXiv:2204.02311, appendix B,
    with half the square because the mask is causal). Backward costs twice as much whatever the length, so that the
    proportions, which are all that balancing needs, are the same.
    """
    expert_width = shape.experts_per_token * shape.moe_ffn_size + shape.shared_ffn_size
    moe_layers = shape.num_layers - shape.num_dense_layers
    feed_forward_width = shape.num_dense_layers * shape.ffn_size + moe_layers * expert_width
    weights = (
        shape.num_layers * shape.attention_matrices
        + 3 * shape.hidden_size * feed_forward_width
        + moe_layers * shape.hidden_size * shape.num_experts
        + shape.hidden_size * shape.vocab_size
    )
    scores_and_sum = shape.query_width + shape.attention_output_width
    return 2 * weights * length + shape.num_layers * scores_and_sum * length * length


def partition(costs: Sequence[float], parts: int, *, equal_counts: bool) -> list[list[int]]:
    """Splits items into `parts` whose sums of cost are as equal as possible.

    Largest differencing (Karmarkar and Karp 1982; balanced variant: Yakir 1996), then swaps between the heaviest
    part and lighter ones. No part is empty unless there are fewer items than parts.

    Args:
        costs: one number, at least 0, an item.
        equal_counts: every part gets the same number of items; otherwise only the sums count.

    Returns:
        `parts` lists of indices into `costs`, each ascending, every index exactly once.

    Raises:
        ValueError: a cost that is negative or not finite; no part; `equal_counts` with a count of items that is not a
            multiple of `parts`.
    """
    _check_costs(costs)
    if parts < 1:
        raise ValueError(f"parts must be at least 1, not {parts}")
    if equal_counts and len(costs) % parts:
        raise ValueError(f"{len(costs)} items cannot be split into {parts} parts of equal count; drop or add items")
    # Largest first, and the earlier index first among equals.
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    entries: list[_Entry] = [(costs[index], index) for index in order]
    size = parts if equal_counts else 1
    result = _largest_differencing([entries[i : i + size] for i in range(0, len(entries), size)], parts)
    result += [[] for _ in range(parts - len(result))]
    _refine(result, costs, may_move=not equal_counts)
    return [sorted(part) for part in result]


def pack(lengths: Sequence[int], max_tokens: int, *, multiple_of: int = 1, at_least: int = 1) -> list[list[int]]:
    """Puts sequences into as few micro-batches of at most `max_tokens` tokens as found, of equal token counts.

    The number of micro-batches is the lower bound ⌈Σ lengths / max_tokens⌉ wherever a packing of that size is found
    (largest differencing, then best fit decreasing), rounded up to a multiple.

    Args:
        lengths: tokens of each sequence.
        max_tokens: the most that a micro-batch may hold.
        multiple_of: the number of micro-batches is a multiple of this; an interleaved pipeline needs its own size.
        at_least: the least number of micro-batches; the caller's, because all data-parallel ranks need the same.

    Returns:
        Lists of indices into `lengths`, each ascending, every index exactly once. A list is empty only where there
        are fewer sequences than micro-batches.

    Raises:
        ValueError: a sequence longer than `max_tokens`, by index and length; a size below 1.
    """
    _check_costs(lengths)
    if min(max_tokens, multiple_of, at_least) < 1:
        raise ValueError(
            f"max_tokens ({max_tokens}), multiple_of ({multiple_of}) and at_least ({at_least}) must be at least 1"
        )
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=0)
    if lengths and lengths[longest] > max_tokens:
        raise ValueError(
            f"sequence {longest} has {lengths[longest]} tokens, more than max_tokens = {max_tokens}; raise the limit "
            f"or cut the sequence"
        )
    fewest = max(at_least, math.ceil(sum(lengths) / max_tokens))
    bins = math.ceil(fewest / multiple_of) * multiple_of
    while True:
        packed = partition(lengths, bins, equal_counts=False)
        if all(sum(lengths[i] for i in part) <= max_tokens for part in packed):
            return packed
        fitted = _best_fit_decreasing(lengths, bins, max_tokens)
        if fitted is not None:
            _refine(fitted, lengths, may_move=True)
            return [sorted(part) for part in fitted]
        bins += multiple_of


def _check_costs(costs: Sequence[float]) -> None:
    for index, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"item {index} has cost {cost}; a cost is a finite number, at least 0")


def _largest_differencing(groups: list[list[_Entry]], parts: int) -> list[list[int]]:
    """Merges the two groups of largest spread, heavy entries with light ones, until one is left.

    A group is a partition of some of the items, its entries in descending order. Entries beyond those listed are
    empty parts, so a group of fewer than `parts` entries has the spread of its largest one.
    """

    def spread(group: list[_Entry]) -> float:
        return group[0][0] - group[-1][0] if len(group) == parts else group[0][0]

    heap = [(-spread(group), position, group) for position, group in enumerate(groups)]
    heapq.heapify(heap)
    position = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        merged = _merge(one, heap[0][2], parts)
        heapq.heapreplace(heap, (-spread(merged), position, merged))
        position += 1
    return [_flatten(items) for _, items in heap[0][2]] if heap else []


def _merge(one: list[_Entry], other: list[_Entry], parts: int) -> list[_Entry]:
    """The heaviest entry of one with the lightest of the other, and so on; empty parts count as the lightest."""
    alone_one, alone_other = parts - len(other), parts - len(one)
    if alone_one >= len(one):
        merged = one + other
    else:
        pairs = zip(one[alone_one:], reversed(other[alone_other:]), strict=True)
        merged = one[:alone_one] + other[:alone_other]
        merged += [(a + b, (left, right)) for (a, left), (b, right) in pairs]
    merged.sort(key=itemgetter(0), reverse=True)
    return merged


def _flatten(items: Any) -> list[int]:
    """The indices of nested pairs; without recursion, since pairs nest as deep as there are items."""
    flat: list[int] = []
    stack = [items]
    while stack:
        item = stack.pop()
        if isinstance(item, tuple):
            stack.extend(item)
        else:
            flat.append(item)
    return flat


def _best_fit_decreasing(lengths: Sequence[int], bins: int, max_tokens: int) -> list[list[int]] | None:
    """Every sequence, longest first, into the fullest bin that still has room; None where one has no room.

    Where as few sequences are left as there are empty bins, each takes an empty one.
    """
    packed: list[list[int]] = [[] for _ in range(bins)]
    used: list[tuple[int, int]] = []  # (room left, bin), ascending
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    for placed, index in enumerate(order):
        empty = bins - len(used)
        fullest = bisect_left(used, (lengths[index], -1))
        if fullest < len(used) and len(order) - placed > empty:
            room, chosen = used.pop(fullest)
        elif empty:
            room, chosen = max_tokens, len(used)
        else:
            return None
        packed[chosen].append(index)
        insort(used, (room - lengths[index], chosen))
    return packed


def _refine(parts: list[list[int]], costs: Sequence[float], *, may_move: bool) -> None:
    """Exchanges items of the heaviest part with lighter parts, in place, until that lowers the largest sum no more.

    With `may_move` an item may also go without another coming back.
    """
    sums = [sum(costs[index] for index in part) for part in parts]
    enough = sum(sums) / len(parts) * (1 + _ENOUGH)
    items = [sorted((costs[index], index) for index in part) for part in parts]
    for _ in range(len(parts) * _EXCHANGES_PER_PART):
        heavy = max(range(len(parts)), key=sums.__getitem__)
        if sums[heavy] <= enough or not _relieve(heavy, items, sums, may_move):
            break
    parts[:] = [[index for _, index in part] for part in items]


def _relieve(heavy: int, items: list[list[tuple[float, int]]], sums: list[float], may_move: bool) -> bool:
    """Makes the best exchange of part `heavy` with the lightest part that has one; False where no part has."""
    for light in sorted(range(len(sums)), key=sums.__getitem__):
        gap = sums[heavy] - sums[light]
        exchange = _best_exchange(items[heavy], items[light], gap, may_move)
        if exchange is None:
            continue
        given, taken = exchange
        items[heavy].remove(given)
        insort(items[light], given)
        moved = given[0]
        if taken is not None:
            items[light].remove(taken)
            insort(items[heavy], taken)
            moved -= taken[0]
        sums[heavy] -= moved
        sums[light] += moved
        return True
    return False


def _best_exchange(
    heavy: list[tuple[float, int]], light: list[tuple[float, int]], gap: float, may_move: bool
) -> tuple[tuple[float, int], tuple[float, int] | None] | None:
    """(given, taken) whose difference is nearest to half of `gap`, where the two parts would be equal.

    None where no difference lies between 0 and `gap`, that is, where one of the two would be as heavy as before.
    """
    best, distance = None, gap / 2
    for given in heavy:
        wanted = given[0] - gap / 2
        above = bisect_left(light, (wanted, -1))
        candidates: list[tuple[float, int] | None] = [*light[max(above - 1, 0) : above + 1]]
        if may_move:
            candidates.append(None)
        for taken in candidates:
            off = abs(wanted - (0.0 if taken is None else taken[0]))
            if off < distance:
                best, distance = (given, taken), off
    return best
