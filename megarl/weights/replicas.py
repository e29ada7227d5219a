"""Which ranks hold one copy of the model between them, and who of them gives what to whom."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Mapping

from megarl.config.layout import Layout
from megarl.weights.placement import Place, rank_places


class ReplicaDomain:
    """The fewest ranks, of all stages, that hold a whole model with its experts: weights need not leave it.

    Of every stage it has the same block of consecutive ranks. A block holds at least one copy of the dense weights and
    one of the experts, whichever needs more ranks.
    """

    def __init__(self, layout: Layout, number: int, ranks_per_node: int) -> None:
        stage = layout.world_size // layout.pp
        block = range(number * layout.replica_block, (number + 1) * layout.replica_block)
        self.ranks = tuple(first + rank for first in range(0, layout.world_size, stage) for rank in block)
        self._ranks_per_node = ranks_per_node
        holders: dict[Place, list[int]] = collections.defaultdict(list)
        for rank in self.ranks:
            for place in rank_places(layout, rank):
                holders[place].append(rank)
        self.holders: Mapping[Place, tuple[int, ...]] = {place: tuple(ranks) for place, ranks in holders.items()}
        self.sources = functools.cache(self._sources)

    def _sources(self, place: Place) -> dict[int, int]:
        """By receiver, all ranks of the domain, the rank that gives it the parts at `place`.

        A holder serves itself. The others take from holders of their own node, or where there is none from any, in
        turn, so that of equally near holders none gives to two more than another.
        """
        holders = self.holders[place]
        at_node: dict[int, list[int]] = collections.defaultdict(list)
        for rank in holders:
            at_node[rank // self._ranks_per_node].append(rank)
        turns = {node: itertools.cycle(ranks) for node, ranks in at_node.items()}
        far = itertools.cycle(holders)
        own = frozenset(holders)
        return {
            rank: rank if rank in own else next(turns.get(rank // self._ranks_per_node, far)) for rank in self.ranks
        }


def domain_count(layout: Layout) -> int:
    """Domains of a layout; each rank is in one, `Layout.replica`."""
    return layout.world_size // layout.pp // layout.replica_block
