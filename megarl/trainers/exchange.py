"""Moves samples from the ranks that generated them to the ranks that train on them.

Two steps, both in collectives that every rank calls: the numbers of all samples (lengths, scores) become known to every
rank, which is a few bytes a sample; from them each rank computes the same assignment, and the tokens move once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist

from megarl import platform
from megarl.config import ModelShape
from megarl.data.sample import Sample
from megarl.parallel.balance import partition, sequence_flops
from megarl.parallel.groups import Groups
from megarl.trainers.routed_experts import RoutedShape

_COLUMNS = 9
"""Numbers of a sample that every run has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTable:
    """The numbers of all samples of a step, the same on every rank. All [samples], in global order.

    A sample's place is group · samples per prompt + its index in the group.
    """

    source_rank: numpy.ndarray
    """The rank that holds it."""
    prompt_length: numpy.ndarray
    """Tokens."""
    response_length: numpy.ndarray
    """Tokens, with those that the model did not choose."""
    response_tokens: numpy.ndarray
    """Tokens with response mask 1, which are trained on."""
    cut_off: numpy.ndarray
    """Whether the response reached the limit without an end token."""
    failed: numpy.ndarray
    """Whether scoring failed."""
    score: numpy.ndarray
    """float64"""
    group: numpy.ndarray
    parts: dict[str, numpy.ndarray]
    """Further rewards by name, float64."""

    @property
    def size(self) -> int:
        return len(self.group)

    @property
    def total_length(self) -> numpy.ndarray:
        """Tokens of prompt and response."""
        return self.prompt_length + self.response_length


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """What the trainer needs of a sample, on the ranks that train on it."""

    place: int
    """In the table."""
    token_ids: torch.Tensor
    """int64 [prompt + response]"""
    prompt_length: int
    response_mask: torch.Tensor
    """float32 [response]"""
    rollout_logprobs: torch.Tensor
    """float32 [response]"""
    routed_experts: torch.Tensor | None = None
    """int16 [prompt + response, mixtures, top-k], where they are wanted"""


def share_numbers(
    samples: Sequence[Sample],
    groups: int,
    samples_per_prompt: int,
    part: Callable[[Sample, str], float] = lambda sample, name: sample.rewards[name],
    part_names: Sequence[str] = (),
) -> SampleTable:
    """Makes the numbers of all samples known everywhere. Collective over the world.

    Args:
        samples: those of this rank; ranks without any take part too.
        groups: prompts of the step, over all ranks.
        part: a sample's reward of a name.
        part_names: the rewards that are wanted beside the score.

    Raises:
        RuntimeError: a sample is held by no rank, or by two.
    """
    size = groups * samples_per_prompt
    rows = torch.zeros(size, _COLUMNS + len(part_names), dtype=torch.float64)
    for sample in samples:
        rows[sample.group * samples_per_prompt + sample.index] = torch.tensor(
            [
                1.0,
                dist.get_rank(),
                len(sample.prompt.token_ids),
                len(sample.response_ids),
                sum(sample.response_mask),
                sample.finish_reason == "length",
                sample.reward_failure is not None,
                sample.rewards["score"],
                sample.group,
                *(part(sample, name) for name in part_names),
            ],
            dtype=torch.float64,
        )
    on_device = rows.to(platform.current().device)
    # Each row is of one rank and zero elsewhere, so the sum is exact.
    dist.all_reduce(on_device)
    table = on_device.cpu().numpy()
    holders = table[:, 0]
    if (holders != 1).any():
        place = int((holders != 1).argmax())
        raise RuntimeError(f"sample {place} of {size} is held by {int(holders[place])} ranks, not by one")
    whole = lambda column: table[:, column].astype(numpy.int64)
    return SampleTable(
        source_rank=whole(1),
        prompt_length=whole(2),
        response_length=whole(3),
        response_tokens=whole(4),
        cut_off=table[:, 5] > 0,
        failed=table[:, 6] > 0,
        score=table[:, 7],
        group=whole(8),
        parts={name: table[:, _COLUMNS + place] for place, name in enumerate(part_names)},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one data-parallel rank trains on in a mini-batch."""

    places: list[int]
    work: int
    """Estimated FLOPs of a forward pass."""


def assign(table: SampleTable, places: Sequence[int], data_parallel_size: int, shape: ModelShape) -> list[Share]:
    """Shares `places` (one mini-batch) out to data-parallel ranks: equal work, by estimated FLOPs."""
    lengths = table.total_length
    costs = [sequence_flops(int(lengths[place]), shape) for place in places]
    parts = partition(costs, data_parallel_size, equal_counts=False)
    return [Share(places=[places[i] for i in part], work=sum(costs[i] for i in part)) for part in parts]


def move(
    samples: Sequence[Sample],
    table: SampleTable,
    assignment: Sequence[Sequence[int]],
    groups: Groups,
    routed: RoutedShape | None = None,
) -> dict[int, TrainingSample]:
    """Brings every sample to all ranks of the data-parallel rank it is assigned to. Collective over the world.

    Args:
        samples: those that this rank generated.
        assignment: the places that each data-parallel rank trains on, over all mini-batches.
        routed: of the experts that come along; None: none do.

    Returns:
        This rank's samples by place.
    """
    layout, samples_per_prompt = groups.layout, _samples_per_prompt(table)
    mine = {sample.group * samples_per_prompt + sample.index: sample for sample in samples}
    wanted = [sorted(assignment[layout.coordinates(rank).dp]) for rank in range(layout.world_size)]
    send = [[place for place in wanted[rank] if place in mine] for rank in range(layout.world_size)]
    receive = [
        [place for place in wanted[groups.rank] if table.source_rank[place] == rank]
        for rank in range(layout.world_size)
    ]
    tokens = _all_to_all(
        [torch.tensor([t for place in places for t in _integers(mine[place])], dtype=torch.int64) for places in send],
        [int(sum(table.total_length[place] + table.response_length[place] for place in places)) for places in receive],
    )
    logprobs = _all_to_all(
        [torch.tensor([v for p in places for v in mine[p].rollout_logprobs], dtype=torch.float32) for places in send],
        [int(sum(table.response_length[place] for place in places)) for places in receive],
    )
    experts = _move_experts(mine, table, send, receive, routed)
    found = {}
    for places, integers, values in zip(receive, tokens, logprobs, strict=True):
        for place in places:
            prompt, response = int(table.prompt_length[place]), int(table.response_length[place])
            rest = len(integers) - prompt - 2 * response
            token_ids, mask, integers = integers.split([prompt + response, response, rest])
            rollout_logprobs, values = values.split([response, len(values) - response])
            found[place] = TrainingSample(
                place=place,
                token_ids=token_ids,
                prompt_length=prompt,
                response_mask=mask.float(),
                rollout_logprobs=rollout_logprobs,
                routed_experts=experts.get(place),
            )
    return found


def _move_experts(
    mine: Mapping[int, Sample],
    table: SampleTable,
    send: Sequence[Sequence[int]],
    receive: Sequence[Sequence[int]],
    routed: RoutedShape | None,
) -> dict[int, torch.Tensor]:
    """The experts of the samples that come here, by place. Collective over the world, unless `routed` is None."""
    if routed is None:
        return {}

    def flat(place: int) -> torch.Tensor:
        experts = mine[place].routed_experts
        assert experts is not None  # `RoutedShape.check` has looked
        return torch.from_numpy(experts.reshape(-1).astype(numpy.int16))

    nothing = torch.empty(0, dtype=torch.int16)
    # As bytes: NCCL has no 16-bit integers.
    parts = _all_to_all(
        [torch.cat([nothing, *map(flat, places)]).view(torch.uint8) for places in send],
        [int(2 * routed.numbers * sum(table.total_length[place] for place in places)) for places in receive],
    )
    found: dict[int, torch.Tensor] = {}
    for places, part in zip(receive, parts, strict=True):
        # A part may begin anywhere in what was received, and a view of other width has to begin at a whole number.
        lengths = [int(table.total_length[place]) for place in places]
        numbers = part.clone().view(torch.int16).view(sum(lengths), routed.mixtures, routed.topk)
        found |= dict(zip(places, numbers.split(lengths), strict=True))
    return found


def _samples_per_prompt(table: SampleTable) -> int:
    return table.size // (int(table.group[-1]) + 1)


def _integers(sample: Sample) -> list[int]:
    return [*sample.prompt.token_ids, *sample.response_ids, *sample.response_mask]


def _all_to_all(parts: list[torch.Tensor], sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Sends part r to rank r; returns what each rank sent here, of the sizes given. On the CPU."""
    device = platform.current().device
    source = torch.cat(parts).to(device)
    target = source.new_empty(sum(sizes))
    dist.all_to_all_single(target, source, sizes, [part.numel() for part in parts])
    return target.cpu().split(sizes)
