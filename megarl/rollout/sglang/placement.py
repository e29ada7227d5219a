"""Where an engine of several ranks stands: which ranks, which of them start processes, on which nodes and devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """One rank's view of its engine: `size` consecutive ranks of the world."""

    rank: int
    first_rank: int
    """The engine's first rank: it gets the requests."""
    size: int
    """Ranks of the engine, its tensor-parallel size."""
    nodes: int
    """Nodes that it spans."""
    node: int
    """Which of these this rank is on, from 0."""
    base_device: int
    """The first of the engine's devices on this node, by local rank."""

    @property
    def engine(self) -> int:
        """Number of the engine among all."""
        return self.first_rank // self.size

    @property
    def is_leader(self) -> bool:
        """Whether this rank gets the engine's requests."""
        return self.rank == self.first_rank

    @property
    def starts_process(self) -> bool:
        """Whether this rank starts its node's part of the engine."""
        return self.rank == self.first_rank + self.node * (self.size // self.nodes)

    @property
    def ranks(self) -> range:
        """Of the engine."""
        return range(self.first_rank, self.first_rank + self.size)


def place(rank: int, size: int, ranks_per_node: int) -> Placement:
    """The placement of one rank.

    Args:
        size: ranks of an engine.
        ranks_per_node: what torchrun calls the local world size.

    Raises:
        ValueError: engines would share a node with a part of another, which SGLang has no arguments for.
    """
    if size % ranks_per_node and ranks_per_node % size:
        raise ValueError(
            f"an engine of {size} ranks (rollout.tensor_model_parallel_size) fits neither into a node of "
            f"{ranks_per_node} ranks nor into several whole ones: choose a divisor or a multiple of {ranks_per_node}"
        )
    first = first_of(rank, size)
    nodes = max(size // ranks_per_node, 1)
    return Placement(
        rank=rank,
        first_rank=first,
        size=size,
        nodes=nodes,
        node=(rank - first) // (size // nodes),
        base_device=first % ranks_per_node,
    )


def place_beside_server(rank: int, size: int) -> Placement:
    """The placement of one of `size` consecutive ranks that share a server of its own: none starts anything."""
    return Placement(rank=rank, first_rank=first_of(rank, size), size=size, nodes=1, node=0, base_device=0)


def place_server(number: int, size: int, nodes: int, node: int) -> Placement:
    """The placement of one node's part of a server, which has its nodes' devices for itself.

    Args:
        number: of the server among all.
        size: its tensor-parallel size.

    Raises:
        ValueError: the nodes would have parts of different sizes.
    """
    if size % nodes:
        raise ValueError(
            f"a server of {size} GPUs (rollout.tensor_model_parallel_size) cannot share them out over {nodes} nodes: "
            f"choose a divisor of {size}"
        )
    rank = number * size + node * (size // nodes)
    return Placement(rank=rank, first_rank=number * size, size=size, nodes=nodes, node=node, base_device=0)


def first_of(rank: int, size: int) -> int:
    """The first of the `size` consecutive ranks that `rank` is one of."""
    return rank // size * size
