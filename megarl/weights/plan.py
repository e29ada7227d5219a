"""The weight plan: which boxes of which tensors go from whom in which bucket to which engine rank.

Pure: from the placed tensors, the layout and the engine layout every rank derives the same plan and asks nobody. The
executor (`bucket_stream`) walks the steps of its rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.config.layout import Layout
from megarl.weights.boxes import Box
from megarl.weights.bucket import Entry, aligned
from megarl.weights.placement import Place, PlacedTensor, rank_places
from megarl.weights.replicas import ReplicaDomain, domain_count


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLayout:
    """How engines stand on the ranks of the trainer."""

    tp: int = 1
    """Consecutive ranks that form one engine."""
    ep: int = 1
    """Ranks among which an engine shares its experts out, in equal runs of experts; it divides `tp`."""
    by_first_rank: bool = False
    """Whether the first of the ranks takes everything for the engine, which is elsewhere, and the others nothing."""

    def takes(self, rank: int, share: int | None) -> bool:
        """Whether the engine's part on `rank` needs a share of the experts; None: what is in no share."""
        if self.by_first_rank:
            return rank % self.tp == 0
        return share is None or share == self.expert_rank(rank)

    def expert_rank(self, rank: int) -> int:
        """Which share of the experts the engine's part on `rank` has; SGLang's order (`moe_ep_rank`)."""
        return rank % self.tp // (self.tp // self.ep)


@dataclass(frozen=True, slots=True)
class Item:
    """One box in a message."""

    name: str
    box: Box
    offset: int
    """Bytes from the message's start, aligned."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """Boxes that one rank packs once and sends to each of some ranks."""

    source: int
    receivers: tuple[int, ...]
    """All of them where this rank is the source, and otherwise this rank."""
    items: tuple[Item, ...]
    offset: int
    """Bytes from the start of the staging memory of the rank whose step this is in."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does for one bucket."""

    entries: tuple[Entry, ...]
    """The bucket that its engine takes."""
    num_bytes: int
    """Of that bucket."""
    copies: tuple[tuple[str, Box], ...]
    """Boxes that go from its own parameters into the bucket."""
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    staging_bytes: int
    """Of all messages."""


class WeightPlan:
    """The plan of a sync. Made once for a run."""

    def __init__(
        self,
        tensors: Iterable[PlacedTensor],
        layout: Layout,
        engine: EngineLayout,
        *,
        num_experts: int,
        bucket_bytes: int,
        ranks_per_node: int,
    ) -> None:
        """Orders the tensors and divides them into buckets.

        Args:
            num_experts: routed experts of a layer; 0: a dense model.
            bucket_bytes: what neither a bucket nor the messages that fill it exceed on any rank, but where tensors that
                must stand together are larger.
            ranks_per_node: consecutive ranks with fast links among them.
        """
        self.layout, self.engine = layout, engine
        self._experts_of_a_rank = max(num_experts // engine.ep, 1)
        self.domains = [ReplicaDomain(layout, number, ranks_per_node) for number in range(domain_count(layout))]
        self.buckets = tuple(self._divide(_mixed(tensors), bucket_bytes))
        self.tensors = tuple(tensor for bucket in self.buckets for tensor in bucket)
        """In the order in which they are sent."""

    def domain_of(self, rank: int) -> ReplicaDomain:
        """The domain within which `rank` gives and takes."""
        return self.domains[self.layout.replica(rank)]

    def takes(self, rank: int, tensor: PlacedTensor) -> bool:
        """Whether the engine's part on `rank` needs `tensor`: all but the experts of its other parts."""
        return self.engine.takes(rank, self._share(tensor))

    def _share(self, tensor: PlacedTensor) -> int | None:
        """The share of the experts that a tensor is in; None: every engine rank needs it."""
        if tensor.expert is None or self.engine.ep == 1:
            return None
        return tensor.expert // self._experts_of_a_rank

    # Buckets

    def _divide(self, units: Iterable[Sequence[PlacedTensor]], limit: int) -> Iterator[tuple[PlacedTensor, ...]]:
        """Buckets that fit every rank, filled in order. All engines get the same sequence, whichever domain gives it:
        the ranks of one engine take their buckets together."""
        bucket: list[PlacedTensor] = []
        filled = np.zeros((2, self.layout.world_size), dtype=np.int64)
        for unit in units:
            added = np.zeros_like(filled)
            for tensor in unit:
                self._add_load(tensor, added)
            if bucket and (filled + added).max() > limit:
                yield tuple(bucket)
                bucket, filled = [], np.zeros_like(filled)
            bucket += unit
            filled += added
        if bucket:
            yield tuple(bucket)

    def _add_load(self, tensor: PlacedTensor, load: np.ndarray) -> None:
        """Adds to [2, ranks] bytes what the tensor takes of each rank's bucket, and of its staging memory."""
        share = self._share(tensor)
        load[0] += aligned(tensor.num_bytes) * self._takers(share)
        for part in tensor.parts:
            load[1] += aligned(part.numel * tensor.dtype.itemsize) * self._movers(part.place, share)

    @functools.cache  # noqa: B019  # one plan lives as long as its run
    def _takers(self, share: int | None) -> np.ndarray:
        """[ranks] 0 or 1: whether the engine's part there needs this share of the experts."""
        ranks = range(self.layout.world_size)
        return np.array([self.engine.takes(rank, share) for rank in ranks], dtype=np.int64)

    @functools.cache  # noqa: B019
    def _movers(self, place: Place, share: int | None) -> np.ndarray:
        """[ranks] 0 or 1: whether a rank has a message with parts of a place in its staging memory, in or out."""
        takers = self._takers(share).tolist()
        found: set[int] = set()
        for domain in self.domains:
            for receiver, source in domain.sources(place).items():
                if receiver != source and takers[receiver]:
                    found.update((receiver, source))
        movers = np.zeros(self.layout.world_size, dtype=np.int64)
        movers[list(found)] = 1
        return movers

    # Steps

    def steps(self, rank: int) -> list[Step]:
        """What `rank` does, bucket by bucket."""
        return [self._step(rank, bucket) for bucket in self.buckets]

    def _step(self, rank: int, bucket: Sequence[PlacedTensor]) -> Step:
        domain = self.domain_of(rank)
        mine = frozenset(rank_places(self.layout, rank))
        entries, copies, size = [], [], 0
        # Receivers get all messages of one sender in the order in which their first tensors come in the bucket: both
        # sides go by that order, as gloo and NCCL match messages by it.
        outgoing: dict[tuple[Place, int | None], list[tuple[str, Box, int]]] = {}
        incoming: dict[tuple[Place, int | None], list[tuple[str, Box, int]]] = {}
        for tensor in bucket:
            takes, share = self.takes(rank, tensor), self._share(tensor)
            if takes:
                entries.append(Entry(tensor.name, tensor.dtype, tensor.shape, size))
                size += aligned(tensor.num_bytes)
            for part in tensor.parts:
                item = (tensor.name, part.box, part.numel * tensor.dtype.itemsize)
                if part.place in mine:
                    if takes:
                        copies.append((tensor.name, part.box))
                    outgoing.setdefault((part.place, share), []).append(item)
                elif takes:
                    incoming.setdefault((part.place, share), []).append(item)
        staged = 0
        sends, receives = [], []
        for (place, share), items in outgoing.items():
            receivers = self._receivers(rank, place, share)
            if receivers:
                sends.append(_message(rank, receivers, items, staged))
                staged += sends[-1].num_bytes
        for (place, _), items in incoming.items():
            receives.append(_message(domain.sources(place)[rank], (rank,), items, staged))
            staged += receives[-1].num_bytes
        return Step(tuple(entries), size, tuple(copies), tuple(sends), tuple(receives), staged)

    @functools.cache  # noqa: B019
    def _receivers(self, rank: int, place: Place, share: int | None) -> tuple[int, ...]:
        """The ranks to which `rank` gives the parts of a place that it holds."""
        takers = self._takers(share)
        sources = self.domain_of(rank).sources(place)
        return tuple(
            receiver for receiver, source in sources.items() if source == rank and receiver != rank and takers[receiver]
        )


def _message(source: int, receivers: tuple[int, ...], boxes: Iterable[tuple[str, Box, int]], offset: int) -> Message:
    items, size = [], 0
    for name, box, num_bytes in boxes:
        items.append(Item(name, box, size, num_bytes))
        size += aligned(num_bytes)
    return Message(source, receivers, tuple(items), offset, size)


def _mixed(tensors: Iterable[PlacedTensor]) -> list[list[PlacedTensor]]:
    """Units of tensors that stand together, so ordered that each bucket has its share of what every rank holds.

    In the model's order the ranks of one stage, or those with certain experts, would fill a whole bucket while the
    others wait.
    """
    units: dict[str, list[PlacedTensor]] = {}
    for tensor in tensors:
        units.setdefault(_unit(tensor.name), []).append(tensor)
    lanes: dict[tuple, list[list[PlacedTensor]]] = {}
    for unit in units.values():
        lanes.setdefault(tuple(part.place for part in unit[0].parts), []).append(unit)
    order = []
    for lane, of_lane in enumerate(lanes.values()):
        sizes = [sum(tensor.num_bytes for tensor in unit) for unit in of_lane]
        total, before = sum(sizes), 0
        for size, unit in zip(sizes, of_lane, strict=True):
            order.append((before / total, lane, unit))
            before += size
    order.sort(key=lambda item: item[:2])
    return [unit for _, _, unit in order]


_TOGETHER = ("q_a_proj", "kv_a_proj_with_mqa")
"""SGLang makes one matrix of these two (`fuse_qkv_a_proj`), and only of what comes in one call: alone, each is lost."""


def _unit(name: str) -> str:
    for module in _TOGETHER:
        name = name.replace(f".{module}.", ".a_proj.")
    return name
