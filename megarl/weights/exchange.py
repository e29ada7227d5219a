"""Brings whole tensors to the ranks that want them, in rounds in which all ranks give and take at the same time.

A round moves so much that no rank gives or takes more than `_ROUND_BYTES`, or one tensor that is larger than that:
whatever the layout, a rank needs three times as much memory besides its shard. Between two ranks a round sends one
message, since tens of thousands of small ones would cost more than their bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl import platform
from megarl.weights.boxes import Box, box_index
from megarl.weights.bucket import aligned
from megarl.weights.export_hf import ExportPlan
from megarl.weights.pieces import Piece, Shard
from megarl.weights.safetensors_io import TensorInfo

_ROUND_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Part:
    """One box of a tensor and who gives it."""

    box: Box
    rank: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which tensors each rank wants, in what order, and who gives their parts; the same on every rank."""

    by_rank: Sequence[Sequence[str]]
    tensors: Mapping[str, TensorInfo]
    parts: Mapping[str, Sequence[Part]]
    """Of every wanted tensor. A tensor goes to one rank only."""


Round = list[tuple[int, str]]
"""(the rank that takes, the tensor)"""


def plan_wanted(plan: ExportPlan, by_rank: Sequence[Sequence[str]]) -> Wanted:
    """Who gives what: a rank that has a part takes its own, else the one that the export plan names gives it.

    Collective over the world.

    Args:
        by_rank: the names that each rank wants, in the order it wants them; the same on every rank.
    """
    rank = dist.get_rank()
    held = {name: {piece.hf_box for _, piece in plan.mine.get(name, ())} for name in by_rank[rank]}
    own = {
        name: [index for index, s in enumerate(plan.sources[name]) if s.rank != rank and s.box in held[name]]
        for name in by_rank[rank]
    }
    gathered: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, {name: indices for name, indices in own.items() if indices})
    parts = {}
    for taker, names in enumerate(by_rank):
        for name in names:
            kept = gathered[taker].get(name, ())
            parts[name] = [
                Part(s.box, taker if index in kept else s.rank) for index, s in enumerate(plan.sources[name])
            ]
    return Wanted(by_rank, plan.tensors, parts)


def plan_rounds(wanted: Wanted, round_bytes: int = _ROUND_BYTES) -> list[Round]:
    """Cuts what is wanted into rounds. Pure: no tensors, no processes."""
    rounds: list[Round] = []
    at = [0] * len(wanted.by_rank)
    first = 0
    while True:
        # Each round begins with another rank, so that none always finds the givers busy.
        ranks = [(first + i) % len(at) for i in range(len(at))]
        found: Round = []
        gives: dict[int, int] = defaultdict(int)
        for rank in ranks:
            taken = 0
            names = wanted.by_rank[rank]
            while at[rank] < len(names):
                name = names[at[rank]]
                taken += wanted.tensors[name].num_bytes
                given = _given(wanted, name, rank)
                is_full = taken > round_bytes or any(gives[r] + size > round_bytes for r, size in given.items())
                if is_full and found:
                    break
                for giver, size in given.items():
                    gives[giver] += size
                found.append((rank, name))
                at[rank] += 1
                if is_full:
                    break  # a tensor larger than a round
        if not found:
            return rounds
        rounds.append(found)
        first = (first + 1) % len(at)


def _given(wanted: Wanted, name: str, taker: int) -> dict[int, int]:
    """The bytes that each other rank gives for a tensor."""
    given: dict[int, int] = defaultdict(int)
    for part in wanted.parts[name]:
        if part.rank != taker:
            given[part.rank] += _num_bytes(wanted.tensors[name], part.box)
    return given


def _num_bytes(info: TensorInfo, box: Box) -> int:
    size = info.dtype.itemsize
    for start, stop in box:
        size *= stop - start
    return size


def exchange(
    plan: ExportPlan, wanted: Wanted, progress: Callable[[int], None] | None = None
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Moves the tensors. Collective over the world: every rank must exhaust it.

    Args:
        progress: is told, on every rank, the bytes that all ranks have taken and used since the last call.

    Yields:
        For each round this rank's tensors, (name, whole tensor), in the order wanted, maybe none. They are overwritten
        in the next round: copy them to keep them.
    """
    mover = _Mover(plan, wanted)
    for found in plan_rounds(wanted):
        yield mover.move(found)
        if progress is not None:
            progress(sum(wanted.tensors[name].num_bytes for _, name in found))


class _Mover:
    """This rank's part in every round."""

    def __init__(self, plan: ExportPlan, wanted: Wanted) -> None:
        self._plan, self._wanted = plan, wanted
        self._rank = dist.get_rank()
        self._memory: dict[str, torch.Tensor] = {}

    def move(self, found: Round) -> list[tuple[str, torch.Tensor]]:
        out: dict[int, list[torch.Tensor]] = defaultdict(list)
        into: dict[int, list[torch.Tensor]] = defaultdict(list)
        taken = dict(self._places(found))
        for taker, name in found:
            for part in self._wanted.parts[name]:
                if self._rank == part.rank != taker:
                    out[taker].append(self._held(name, part.box))
                elif self._rank == taker != part.rank:
                    into[part.rank].append(taken[name][box_index(part.box)])
                elif self._rank == taker:
                    target, held = taken[name][box_index(part.box)], self._held(name, part.box)
                    if target.data_ptr() != held.data_ptr():
                        target.copy_(held)
        self._send_and_receive(out, into)
        return list(taken.items())

    def _places(self, found: Round) -> Iterator[tuple[str, torch.Tensor]]:
        """Where this rank's tensors are put together: in the parameter itself, if one is the whole tensor."""
        mine = [name for taker, name in found if taker == self._rank]
        whole = {name: self._whole_parameter(name) for name in mine}
        infos = {name: self._wanted.tensors[name] for name in mine if whole[name] is None}
        memory = iter(self._cut("take", [info.num_bytes for info in infos.values()]))
        for name in mine:
            parameter = whole[name]
            yield name, next(memory).view(infos[name].dtype).view(infos[name].shape) if parameter is None else parameter

    def _whole_parameter(self, name: str) -> torch.Tensor | None:
        parts = self._wanted.parts[name]
        if len(parts) != 1 or parts[0].rank != self._rank:
            return None
        view = self._held(name, parts[0].box)
        return view if tuple(view.shape) == self._wanted.tensors[name].shape else None

    def _held(self, name: str, box: Box) -> torch.Tensor:
        """This rank's values of a box."""
        shard, piece = self._piece(name, box)
        return shard.tensor[box_index(piece.local_box)]

    def _piece(self, name: str, box: Box) -> tuple[Shard, Piece]:
        return next((shard, piece) for shard, piece in self._plan.mine[name] if piece.hf_box == box)

    def _send_and_receive(self, out: dict[int, list[torch.Tensor]], into: dict[int, list[torch.Tensor]]) -> None:
        operations = []
        outgoing = self._cut("give", [sum(map(_nbytes, boxes)) for boxes in out.values()])
        incoming = self._cut("receive", [sum(map(_nbytes, boxes)) for boxes in into.values()])
        for (taker, boxes), buffer in zip(out.items(), outgoing, strict=True):
            for box, place in zip(boxes, _as_boxes(buffer, boxes), strict=True):
                place.copy_(box)
            operations.append(dist.P2POp(dist.isend, buffer, taker))
        for giver, buffer in zip(into, incoming, strict=True):
            operations.append(dist.P2POp(dist.irecv, buffer, giver))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for boxes, buffer in zip(into.values(), incoming, strict=True):
            for box, values in zip(boxes, _as_boxes(buffer, boxes), strict=True):
                box.copy_(values)

    def _cut(self, use: str, sizes: list[int]) -> list[torch.Tensor]:
        """Pieces of that many bytes, from memory that is used again: new pages would cost as much as filling them."""
        if not sizes:
            return []
        sizes_taken = [aligned(size) for size in sizes]
        memory = self._memory.get(use)
        if memory is None or memory.numel() < sum(sizes_taken):
            self._memory.pop(use, None)
            memory = torch.empty(sum(sizes_taken), dtype=torch.uint8, device=platform.current().device)
            self._memory[use] = memory
        parts = memory[: sum(sizes_taken)].split(sizes_taken)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _as_boxes(buffer: torch.Tensor, boxes: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Cuts a message into values of the boxes' shapes and dtypes."""
    start = 0
    for box in boxes:
        yield buffer[start : start + box.nbytes].view(box.dtype).view(box.shape)
        start += _nbytes(box)


def _nbytes(box: torch.Tensor) -> int:
    """What a box takes in a message."""
    return aligned(box.nbytes)
