"""Which samples are trained on: dynamic sampling, overlong shaping and PF-PPO."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms.filters import ResamplingBuffer, informative, overlong_penalty, resampling_weights
from tests.algorithms.batches import on_ranks, splits


def test_groups_whose_metric_is_constant_teach_nothing() -> None:
    metric = torch.tensor([1.0, 0.0, 0.1, 0.1, 0.1, 7.0, 0.0])
    groups = torch.tensor([5, 5, 9, 9, 9, 2, 5])
    assert informative(metric, groups).tolist() == [True, True, False, False, False, False, True]
    assert informative(torch.zeros(0), torch.zeros(0).long()).tolist() == []


def test_groups_are_seen_whole_across_ranks() -> None:
    generator = torch.Generator().manual_seed(1)
    metric, groups = (torch.randint(0, most, (30,), generator=generator) for most in (2, 12))
    whole = informative(metric.float(), groups)
    assert whole.any() and not whole.all()
    for parts in splits(30):
        shares = on_ranks(parts, lambda rows, ranks: informative(metric[rows].float(), groups[rows], ranks))
        for rows, share in zip(parts, shares, strict=True):
            assert torch.equal(share, whole[rows])


def test_the_overlong_penalty_falls_within_the_buffer() -> None:
    lengths = torch.tensor([1, 80, 81, 90, 100, 130])
    assert overlong_penalty(lengths, 100, 20).tolist() == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    assert overlong_penalty(lengths, 100, 20, factor=2.0)[4] == -2.0
    for buffer in (0, 101):
        with pytest.raises(ValueError, match=rf"overlong buffer has {buffer} tokens"):
            overlong_penalty(lengths, 100, buffer)


def test_resampling_weights_are_the_papers() -> None:
    scores = torch.tensor([-2.0, 0.0, 1.0, 1.0])
    assert resampling_weights(scores, "pow", 2.0).tolist() == [4.0, 1e-8, 1.0, 1.0]
    assert resampling_weights(scores, "max_min").tolist() == [1.0, 1e-8, 1.0, 1.0]
    assert resampling_weights(scores, "max_random").tolist() == pytest.approx([0.1, 0.1, 0.4, 0.4])
    with pytest.raises(ValueError, match="reweight_method is 'best', but the methods are pow, max_min, max_random"):
        resampling_weights(scores, "best")


def _buffer(capacity: int = 4, method: str = "pow", seed: int = 0) -> ResamplingBuffer[str]:
    return ResamplingBuffer(capacity, method, 2.0, seed)


def test_a_full_buffer_forgets_the_oldest() -> None:
    buffer = _buffer()
    buffer.add(list("abc"), [1.0, 1.0, 1.0])
    buffer.add(list("def"), [1.0, 1.0, 1.0])
    assert len(buffer) == 4 and set(buffer.draw(200)) == set("cdef")


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    buffer = _buffer()
    buffer.add(list("abc"), [0.0, 1.0, -2.0])
    drawn = buffer.draw(5000)
    assert drawn.count("a") == 0
    assert drawn.count("c") / drawn.count("b") == pytest.approx(4, rel=0.15)


def test_scores_that_are_all_zero_are_drawn_evenly() -> None:
    buffer = _buffer()
    buffer.add(list("abcd"), [0.0] * 4)
    assert {buffer.draw(400).count(item) > 60 for item in "abcd"} == {True}


def test_the_same_seed_draws_the_same_and_a_restored_buffer_goes_on() -> None:
    first, second = _buffer(seed=3), _buffer(seed=3)
    for buffer in (first, second):
        buffer.add(list("abcd"), [1.0, 2.0, 3.0, 4.0])
    assert first.draw(50) == second.draw(50)
    restored = _buffer(seed=99)
    restored.load_state_dict(first.state_dict())
    assert restored.draw(50) == first.draw(50) != _buffer(seed=4)
    smaller = _buffer(capacity=2)
    smaller.load_state_dict(first.state_dict())
    assert set(smaller.draw(100)) == {"c", "d"}


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="an empty buffer"):
        _buffer().draw(1)
    with pytest.raises(ValueError, match="a buffer of 0 samples holds none"):
        _buffer(capacity=0)
    with pytest.raises(ValueError, match="2 samples have 1 scores"):
        _buffer().add(["a", "b"], [1.0])
    with pytest.raises(ValueError, match="reweight_method is 'best'"):
        _buffer(method="best")
