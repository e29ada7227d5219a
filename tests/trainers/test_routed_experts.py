"""Experts that an engine reports are kept on disk as they are, arrive at their tokens, and are refused where broken."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy
import pytest
import torch

from megarl.config import ConfigError
from megarl.config.layout import Layout
from megarl.data.packing import pack_sequences
from megarl.data.sample import Prompt, Sample
from megarl.trainers.dump import RolloutDump, read_step
from megarl.trainers.routed_experts import RoutedShape

SHAPE = RoutedShape(mixtures=3, topk=2, experts=8)


def sample(experts: numpy.ndarray | None) -> Sample:
    """With a prompt of 2 tokens and a response of 3."""
    return Sample(
        prompt=Prompt(row=0, token_ids=[1, 2], messages=[], data_source="sums"),
        group=4,
        index=1,
        response_ids=[3, 4, 5],
        response_mask=[1, 1, 1],
        rollout_logprobs=[-1.0, -1.0, -1.0],
        finish_reason="stop",
        weight_version=0,
        rewards={"score": 1.0},
        routed_experts=experts,
    )


def experts() -> numpy.ndarray:
    chosen = numpy.random.default_rng(0).permuted(numpy.tile(numpy.arange(8), (5, 3, 1)), axis=2)[..., :2]
    chosen[-1] = -1
    return chosen.astype(numpy.int16)


def test_a_dump_gives_back_what_was_written(tmp_path: Path) -> None:
    written = [sample(experts()), dataclasses.replace(sample(None), index=2)]
    RolloutDump(tmp_path, 0, 1).write(3, written)
    reported, without = read_step(tmp_path, 3)
    assert reported.routed_experts is not None and reported.routed_experts.dtype == numpy.int16
    assert numpy.array_equal(reported.routed_experts, experts())
    assert without == written[1]


@pytest.mark.parametrize("damage", [{"shape": [5, 3, 3]}, {"int16": "?"}, {"shape": ["five"]}])
def test_damaged_experts_in_a_dump_are_named_with_their_line(tmp_path: Path, damage: dict[str, object]) -> None:
    RolloutDump(tmp_path, 0, 1).write(3, [sample(experts())])
    (path,) = tmp_path.glob("step-*/*.jsonl")
    fields = json.loads(path.read_text())
    fields["routed_experts"] |= damage
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"rank-00000.jsonl, line 1 is not a sample"):
        read_step(tmp_path, 3)


def test_good_experts_pass() -> None:
    SHAPE.check([sample(experts())], "rollout.replay_dir")


def broken(place: tuple[int, ...], value: int) -> numpy.ndarray:
    found = experts()
    found[place] = value
    return found


BROKEN = {
    "none": (None, "without the experts that an engine chose"),
    "of another length": (experts()[:4], r"of shape \[4, 3, 2\] in the place of \[5, 3, 2\]"),
    "of another model": (broken((0, 1, 0), 8), "with expert 8, where the model has 0 … 7"),
    "below": (broken((0, 1, 0), -2), "with expert -2"),
    "one expert twice": (broken((1, 2), 5), "does not go to 2 different experts"),
    "half unknown": (broken((1, 2, 0), -1), "does not go to 2 different experts"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_experts_that_cannot_be_replayed_are_refused_in_a_sentence(name: str) -> None:
    reported, said = BROKEN[name]
    with pytest.raises(ConfigError, match=rf"mode is R3, but rollout.replay_dir gives sample 1 of prompt 4 .*{said}"):
        SHAPE.check([sample(reported)], "rollout.replay_dir")


@pytest.mark.parametrize("cp", [1, 2])
def test_packed_experts_stand_at_their_tokens_and_padding_has_none(cp: int) -> None:
    """Each token's experts are its own id."""
    sequences = [torch.arange(1, 6), torch.arange(10, 17), torch.tensor([20])]
    of_tokens = [s.to(torch.int16)[:, None, None].expand(-1, 3, 2) for s in sequences]
    whole = pack_sequences(sequences, Layout(world_size=cp, cp=cp), num_tokens=32, routed_experts=of_tokens)
    for rank in range(cp):
        shard = whole.shard(cp, rank)
        wanted = torch.where(shard.is_padding, -1, shard.input_ids)
        assert shard.routed_experts is not None and shard.routed_experts.dtype == torch.int16
        assert torch.equal(shard.routed_experts.long(), wanted[:, None, None].expand(-1, 3, 2))


@pytest.mark.parametrize("cp", [1, 2])
def test_each_token_knows_its_sequence(cp: int) -> None:
    sequences = [torch.full((length,), number) for number, length in enumerate((5, 7, 1))]
    whole = pack_sequences(sequences, Layout(world_size=cp, cp=cp), num_tokens=32)
    for rank in range(cp):
        shard = whole.shard(cp, rank)
        real = ~shard.is_padding
        assert torch.equal(whole.sequence_of_token(cp, rank)[real], shard.input_ids[real])
