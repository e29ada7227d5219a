"""Aggregation, compared with loops over whole rows, and the same however tokens are shared out."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable

import pytest
import torch

from megarl.algorithms.aggregate import Denominators, aggregate, row_weights, token_weights
from megarl.config.layout import Layout
from megarl.config.schema_learning import LOSS_AGG_MODES
from megarl.data.packing import pack_multiple, pack_sequences
from megarl.parallel.context import zigzag_positions

SCALE = 64.0


def _batch() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(losses, masks) of rows of uneven length; a mask has holes, one row has a single token and one has none."""
    generator = torch.Generator().manual_seed(4)
    losses = [torch.randn(length, generator=generator, dtype=torch.float64) for length in (9, 1, 23, 4, 40, 7, 2, 16)]
    masks = [torch.rand(len(row), generator=generator) < 0.7 for row in losses]
    masks[1][:] = True
    masks[3][:] = False
    return losses, masks


def _expected(mode: str, losses: list[torch.Tensor], masks: list[torch.Tensor]) -> float:
    rows = [row[mask].tolist() for row, mask in zip(losses, masks, strict=True) if mask.any()]
    match mode:
        case "token-mean":
            return statistics.fmean(itertools.chain(*rows))
        case "token-sum":
            return sum(itertools.chain(*rows))
        case "seq-mean-token-sum":
            return statistics.fmean(sum(row) for row in rows)
        case "seq-mean-token-mean":
            return statistics.fmean(statistics.fmean(row) for row in rows)
        case "seq-mean-token-sum-norm":
            return statistics.fmean(sum(row) / SCALE for row in rows)
    raise AssertionError(mode)


def _lengths(masks: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([int(mask.sum()) for mask in masks])


def _weights(mode: str, masks: list[torch.Tensor], rows: list[int], whole: Denominators) -> torch.Tensor:
    scale = SCALE if mode == "seq-mean-token-sum-norm" else None
    return row_weights(mode, _lengths(masks[row] for row in rows), whole, loss_scale_factor=scale)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_padded_batch_gives_the_mean_that_the_mode_names(mode: str) -> None:
    losses, masks = _batch()
    for width in (40, 97):
        padded = torch.full((len(losses), width), float("nan"))
        mask = torch.zeros(len(losses), width, dtype=torch.bool)
        for row, (values, valid) in enumerate(zip(losses, masks, strict=True)):
            padded[row, : len(values)] = values.float()
            mask[row, : len(values)] = valid
        weights_of_rows = _weights(mode, masks, list(range(len(losses))), Denominators.of(_lengths(masks)))
        rows = torch.arange(len(losses)).unsqueeze(1).expand(-1, width)
        loss = aggregate(padded, token_weights(weights_of_rows, rows, mask))
        assert loss.item() == pytest.approx(_expected(mode, losses, masks), rel=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_uneven_packs_on_data_and_context_parallel_ranks_sum_to_the_global_loss(mode: str, cp: int) -> None:
    losses, masks = _batch()
    layout = Layout(world_size=cp, cp=cp)
    by_dp_rank: list[list[list[int]]] = [[[4], [0, 1, 2]], [[3], [5], [6, 7]]]  # rows of each micro-batch
    local = [[row for pack in packs for row in pack] for packs in by_dp_rank]
    lengths_by_rank = [_lengths(masks[row] for row in rows) for rows in local]
    totals = torch.tensor([[lengths.sum(), (lengths > 0).sum()] for lengths in lengths_by_rank]).sum(0)
    leaf = torch.cat(losses).float().requires_grad_()
    columns = leaf.split([len(row) for row in losses])
    shares = []
    for packs, rows in zip(by_dp_rank, local, strict=True):
        denominators = Denominators.of(_lengths(masks[row] for row in rows), reduce=lambda _: totals)
        weights = dict(zip(rows, _weights(mode, masks, rows, denominators), strict=True))
        for pack in packs:
            batch = pack_sequences(
                [torch.ones(len(losses[row]), dtype=torch.int64) for row in pack],
                layout,
                columns={
                    "loss": [columns[row] for row in pack],
                    "weight": [torch.where(masks[row], weights[row], 0.0) for row in pack],
                },
                num_tokens=64 * pack_multiple(layout),
            )
            for cp_rank in range(cp):
                shard = zigzag_positions(batch.bounds, cp, cp_rank)
                shares.append(aggregate(batch.columns["loss"][shard], batch.columns["weight"][shard]))
    loss = sum(shares)
    assert isinstance(loss, torch.Tensor)
    assert loss.item() == pytest.approx(_expected(mode, losses, masks), rel=1e-6)
    loss.backward()
    # The gradient in a token's loss is its weight: the derivative of the loop over whole rows.
    whole = torch.cat(losses).requires_grad_()
    pieces = whole.split([len(row) for row in losses])
    expected = sum(
        _differentiable(mode, row[mask], len([m for m in masks if m.any()]), int(_lengths(masks).sum()))
        for row, mask in zip(pieces, masks, strict=True)
        if mask.any()
    )
    assert isinstance(expected, torch.Tensor)
    expected.backward()
    torch.testing.assert_close(leaf.grad.double(), whole.grad, rtol=1e-6, atol=0)  # type: ignore[union-attr]


def _differentiable(mode: str, row: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """A row's share of the loss."""
    shares = {
        "token-mean": row.sum() / tokens,
        "token-sum": row.sum(),
        "seq-mean-token-sum": row.sum() / rows,
        "seq-mean-token-mean": row.mean() / rows,
        "seq-mean-token-sum-norm": row.sum() / SCALE / rows,
    }
    return shares[mode]


def test_denominators_are_reduced_once_and_count_only_rows_with_valid_tokens() -> None:
    calls = []

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.tolist())
        return tensor * 3

    assert Denominators.of(torch.tensor([4, 0, 1]), reduce) == Denominators(tokens=15, rows=6)
    assert calls == [[5, 2]]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_mini_batch_without_a_valid_token_has_loss_zero(mode: str) -> None:
    lengths = torch.tensor([0, 0])
    weights = row_weights(mode, lengths, Denominators.of(lengths), loss_scale_factor=SCALE)
    rows, mask = torch.tensor([0, 0, 1]), torch.zeros(3)
    losses = torch.full((3,), float("nan"), requires_grad=True)
    loss = aggregate(losses, token_weights(weights, rows, mask))
    loss.backward()
    assert loss == 0 and losses.grad is not None and losses.grad.eq(0).all()


def test_a_single_valid_token_is_the_loss_in_every_mean() -> None:
    lengths = torch.tensor([0, 1])
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        weights = token_weights(
            row_weights(mode, lengths, Denominators.of(lengths)), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])
        )
        assert aggregate(torch.tensor([float("nan"), 2.5, float("inf")]), weights) == 2.5


def test_an_unknown_mode_and_a_missing_scale_are_refused() -> None:
    lengths = torch.tensor([1])
    with pytest.raises(ValueError, match=r"actor.loss_agg_mode is 'mean', but the modes are token-mean, token-sum"):
        row_weights("mean", lengths, Denominators.of(lengths))
    with pytest.raises(ValueError, match="needs a loss_scale_factor"):
        row_weights("seq-mean-token-sum-norm", lengths, Denominators.of(lengths))
