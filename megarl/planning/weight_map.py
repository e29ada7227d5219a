"""The proof that a layout's shards make up a model: every tensor of the architecture, each element exactly once.

`simulated_ranks` builds Megatron's real modules of every rank and asks them for their pieces; this file holds the
answers against three things that know nothing of them: the architecture's own tensors (transformers), the stage and the
expert-parallel rank that a layer and an expert belong to (the layout), and the weights that the memory plan counts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.config.layout import Layout
from megarl.planning.architecture import Architecture, Head
from megarl.planning.parameters import stage_chunks, stage_parameters

PROBLEMS_SHOWN = 10
"""Of one model's map: where one shard is wrong, thousands may be."""

Box = tuple[tuple[int, int], ...]
"""A start and a stop for each dimension."""
Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A box of a tensor, and where it lies in a rank's parameter."""

    tensor: str
    tensor_shape: Shape
    """Of the whole tensor, as the rank takes it to be."""
    box: Box
    local_box: Box


class Parameter(NamedTuple):
    """One parameter of a rank, or the expert bias, which is a buffer."""

    name: str
    """Megatron-Core's, with global layer and expert numbers."""
    shape: Shape
    is_copy: bool
    """A tied output layer on the last stage, which is loaded but not exported."""
    pieces: tuple[Piece, ...]

    @property
    def is_buffer(self) -> bool:
        return self.name.endswith("expert_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankClass:
    """Ranks that hold the same: they differ only in data- and context-parallel coordinates, which no module knows."""

    tp: int
    pp: int
    ep: int
    etp: int
    ranks: tuple[int, ...]

    @property
    def first(self) -> int:
        """The rank that is built for the class."""
        return self.ranks[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What the ranks of a class hold."""

    ranks: RankClass
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        """Weights, padding included, buffers not."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters if not parameter.is_buffer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """One box of one tensor on the ranks of a class."""

    ranks: RankClass
    box: Box


def rank_classes(layout: Layout) -> list[RankClass]:
    """The classes of a layout, in the order of their first ranks."""
    found: dict[tuple[int, int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        found.setdefault((at.tp, at.pp, at.ep, at.etp), []).append(rank)
    return [RankClass(tp=tp, pp=pp, ep=ep, etp=etp, ranks=tuple(ranks)) for (tp, pp, ep, etp), ranks in found.items()]


def map_problems(
    held: Sequence[Held], tensors: Mapping[str, Shape], architecture: Architecture, layout: Layout, head: Head
) -> list[str]:
    """Every reason why the shards are not the model, one sentence for each parameter or tensor; empty: proven.

    Args:
        held: of every class of ranks.
        tensors: names and shapes of the architecture, from a source that knows nothing of Megatron.
    """
    places = _Places(architecture, layout)
    holders: dict[str, list[Holder]] = {}
    shapes: dict[str, dict[Shape, int]] = {}
    problems = list(_weight_problems(held, architecture, layout, head))
    for of_class in held:
        for parameter in of_class.parameters:
            problem = _parameter_problem(parameter)
            if problem:
                problems.append(f"{parameter.name} of rank {of_class.ranks.first}: {problem}.")
            for piece in parameter.pieces:
                shapes.setdefault(piece.tensor, {}).setdefault(piece.tensor_shape, of_class.ranks.first)
                if not parameter.is_copy and _volume(piece.box):
                    holders.setdefault(piece.tensor, []).append(Holder(ranks=of_class.ranks, box=piece.box))
    classes = [of_class.ranks for of_class in held]
    for name, shape in tensors.items():
        if name not in holders:
            problems.append(f"No rank holds {name} {list(shape)}.")
            continue
        wrong = next(((found, rank) for found, rank in shapes[name].items() if found != shape), None)
        if wrong:
            problems.append(f"Rank {wrong[1]} takes {name} to have shape {list(wrong[0])}, but it has {list(shape)}.")
            continue
        problem = _tensor_problem(name, shape, holders[name], places.owners(name, classes))
        if problem:
            problems.append(problem)
    for name in holders.keys() - tensors.keys():
        ranks = _ranks(holder.ranks for holder in holders[name])
        problems.append(f"{ranks} a tensor {name}, which the architecture does not have.")
    return problems


def _weight_problems(held: Sequence[Held], architecture: Architecture, layout: Layout, head: Head) -> Iterator[str]:
    """Ranks that map more or fewer weights than the memory plan counts."""
    counted = [stage_parameters(architecture, layout, stage, head).total for stage in range(layout.pp)]
    for of_class in held:
        expected = counted[of_class.ranks.pp]
        if of_class.numel != expected:
            yield f"Rank {of_class.ranks.first} maps {of_class.numel} weights, where the memory plan counts {expected}."


_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters whose rows are padded at the end to a multiple of the tensor-parallel size."""


def _parameter_problem(parameter: Parameter) -> str | None:
    """Says how the pieces fail to fill a parameter exactly once."""
    for piece in parameter.pieces:
        lengths = [[stop - start for start, stop in box] for box in (piece.box, piece.local_box)]
        if lengths[0] != lengths[1]:
            return (
                f"{described(piece.tensor, piece.tensor_shape, piece.box)} is put into a part of another size, "
                f"{described('', parameter.shape, piece.local_box)}"
            )
    boxes = [piece.local_box for piece in parameter.pieces]
    rows = boxes[0][0][1] if parameter.name in _VOCABULARY and boxes else parameter.shape[0]
    problem = cover_problem((rows, *parameter.shape[1:]), [box for box in boxes if _volume(box)])
    return problem and f"its part {problem}"


def _tensor_problem(name: str, shape: Shape, holders: Sequence[Holder], owners: Sequence[RankClass]) -> str | None:
    """Says how the holders of one tensor fail to hold it exactly once, and at their places."""
    stray = [holder for holder in holders if holder.ranks not in owners]
    if stray:
        return (
            f"{_ranks(holder.ranks for holder in stray)} {described(name, shape, stray[0].box)}, which belongs on "
            f"{_ranks(owners, verb='')}."
        )
    by_box: dict[Box, list[RankClass]] = {}
    for holder in holders:
        by_box.setdefault(holder.box, []).append(holder.ranks)
    problem = cover_problem(shape, list(by_box))
    if problem:
        at = {box: _ranks(classes) for box, classes in by_box.items()}
        around = "; ".join(f"{who} {described('', shape, box)}" for box, who in sorted(at.items())[:_LISTED])
        return f"Of {name} {list(shape)} the part {problem}; {around}{'; …' if len(at) > _LISTED else ''}."
    is_expert = _expert_of(name) is not None
    axis = lambda of_class: of_class.etp if is_expert else of_class.tp
    size = len({axis(owner) for owner in owners})
    order = []
    for box, classes in sorted(by_box.items()):
        if len(set(classes)) < len(classes):
            twice = [of_class for of_class in classes if classes.count(of_class) > 1]
            return f"{_ranks(twice)} {described(name, shape, box)} twice."
        among = {axis(of_class) for of_class in classes}
        if len(among) > 1 and (len(among) < size or len(by_box) > 1):
            return (
                f"{_ranks(classes)} {described(name, shape, box)}, though they are tensor-parallel ranks "
                f"{', '.join(map(str, sorted(among)))}, of which one is to hold it or all {size} the whole tensor."
            )
        lacking = [owner for owner in owners if axis(owner) in among and owner not in classes]
        if lacking:
            return f"{_ranks(lacking, 'lacks', 'lack')} {described(name, shape, box)}, which {_ranks(classes).lower()}."
        order.append((min(among), classes, box))
    for (lower, _, _), (upper, classes, box) in itertools.pairwise(order):
        if upper < lower:
            return (
                f"{_ranks(classes)} {described(name, shape, box)}, which comes after what tensor-parallel rank {lower} "
                "holds: the two are exchanged."
            )
    return None


def cover_problem(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Says where `boxes` fail to cover a tensor of `shape` exactly once; None if they do.

    Tensors are cut along one dimension; boxes that are cut along several are said to be so.
    """
    for box in boxes:
        if any(not 0 <= start <= stop <= length for (start, stop), length in zip(box, shape, strict=True)):
            return f"{described('', shape, box)} lies outside"
    cut = {dim for box in boxes for dim, length in enumerate(shape) if box[dim] != (0, length)}
    if len(cut) > 1:
        return f"is cut along dimensions {', '.join(map(str, sorted(cut)))} at once"
    dim = cut.pop() if cut else 0
    part = lambda start, stop: described("", shape, _slab(shape, dim, start, stop))
    reached = 0
    for start, stop in sorted(box[dim] for box in boxes):
        if start > reached:
            return f"{part(reached, start)} is missing"
        if start < reached:
            return f"{part(start, min(reached, stop))} comes twice"
        reached = stop
    return f"{part(reached, shape[dim])} is missing" if reached < shape[dim] else None


class _Places:
    """Where the layout puts each tensor, by the layer and expert in its name."""

    def __init__(self, architecture: Architecture, layout: Layout) -> None:
        shape = architecture.shape
        self._stages = {
            layer: stage
            for stage in range(layout.pp)
            for chunk in stage_chunks(layout, shape.num_layers, stage)
            for layer in chunk.layers
        }
        self._last_stage = layout.pp - 1
        self._experts_of_a_rank = max(shape.num_experts // layout.ep, 1)
        self._found: dict[tuple[int, int | None], list[RankClass]] = {}

    def owners(self, name: str, classes: Sequence[RankClass]) -> list[RankClass]:
        """The classes on whose stage, and among whose experts, the tensor is."""
        expert = _expert_of(name)
        place = (self._stage(name), None if expert is None else expert // self._experts_of_a_rank)
        if place not in self._found:
            self._found[place] = [c for c in classes if c.pp == place[0] and place[1] in (None, c.ep)]
        return self._found[place]

    def _stage(self, name: str) -> int:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer:
            return self._stages[int(layer[1])]
        return 0 if ".embed_tokens." in name else self._last_stage


def _expert_of(name: str) -> int | None:
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else None


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _slab(shape: Shape, dim: int, start: int, stop: int) -> Box:
    return tuple((start, stop) if at == dim else (0, length) for at, length in enumerate(shape))


def described(name: str, shape: Shape, box: Box) -> str:
    """A box as an index: `lm_head.weight[0:512, :]`."""
    parts = (
        ":" if bounds == (0, length) else f"{bounds[0]}:{bounds[1]}" for bounds, length in zip(box, shape, strict=True)
    )
    return f"{name}[{', '.join(parts)}]"


_LISTED = 3
"""Ranks or boxes in one sentence."""


def _ranks(classes: Iterable[RankClass], verb: str = "holds", plural: str = "hold") -> str:
    """`Rank 5 holds`, `Ranks 0, 1, 2 and 5 more hold`; without a verb: `rank 5`."""
    ranks = sorted({rank for of_class in classes for rank in of_class.ranks})
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    listed = ", ".join(map(str, ranks[:_LISTED])) + more
    noun = "rank" if len(ranks) == 1 else "ranks"
    if not verb:
        return f"{noun} {listed}"
    return f"{noun.capitalize()} {listed} {verb if len(ranks) == 1 else plural}"
