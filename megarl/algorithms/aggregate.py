"""From token losses to one number (`actor.loss_agg_mode`), whatever micro-batches and ranks the tokens are on.

A mean of means depends on how tokens were shared out, and gives short micro-batches too much weight. So the weight of
each token is computed before the first forward pass, from the lengths of the global mini-batch; after that a loss is a
plain sum, which micro-batches, data-parallel and context-parallel ranks add up to in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.tokens import select


@dataclass(frozen=True, kw_only=True, slots=True)
class Denominators:
    """What the losses of one mini-batch are divided by: counts over all ranks."""

    tokens: int
    """Valid tokens."""
    rows: int
    """Rows with at least one valid token. Others do not count, so that a filtered sample cannot dilute the rest."""

    @classmethod
    def of(cls, lengths: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Denominators:
        """Those of a mini-batch of which this data-parallel rank has some rows.

        Args:
            lengths: int64 [rows], valid tokens of each whole row on this rank.
            reduce: sums a tensor over data-parallel ranks; None where there is one. Not over context-parallel ranks:
                they hold parts of the same rows. Called once.
        """
        local = torch.stack([lengths.sum(), (lengths > 0).sum()])
        tokens, rows = (local if reduce is None else reduce(local)).tolist()
        return cls(tokens=tokens, rows=rows)


def row_weights(
    mode: str, lengths: Tensor, denominators: Denominators, *, loss_scale_factor: float | None = None
) -> Tensor:
    """The weight of each valid token of each row, so that Σ weight · loss over the global mini-batch is its loss.

    With N valid tokens and B rows in the mini-batch, L of the tokens in this row:

        token-mean               1 / N         every token counts the same (DAPO, arXiv:2503.14476)
        token-sum                1
        seq-mean-token-sum       1 / B
        seq-mean-token-mean      1 / (B·L)     every row counts the same (GRPO, arXiv:2402.03300)
        seq-mean-token-sum-norm  1 / (B·scale) no length in it at all (Dr.GRPO, arXiv:2503.20783)

    Args:
        mode: the name of the config.
        lengths: int64 [rows], valid tokens of each whole row.
        denominators: of the global mini-batch.
        loss_scale_factor: `scale`, in tokens; for seq-mean-token-sum-norm only, which needs it.

    Returns:
        float32 [rows]; 0 for rows without valid tokens.

    Raises:
        ValueError: a mode that does not exist; a scale that is missing.
    """
    if mode not in _ROW_DENOMINATORS:
        raise ValueError(f"actor.loss_agg_mode is '{mode}', but the modes are {', '.join(_ROW_DENOMINATORS)}.")
    if mode == "seq-mean-token-sum-norm" and loss_scale_factor is None:
        raise ValueError("actor.loss_agg_mode seq-mean-token-sum-norm needs a loss_scale_factor, in tokens.")
    divisors = _ROW_DENOMINATORS[mode](lengths.double(), denominators, loss_scale_factor or 1.0)
    return torch.where(lengths > 0, 1 / divisors, 0.0).float()


def token_weights(weights_of_rows: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """The weight of each token: that of its row, and 0 where the mask is 0.

    Args:
        weights_of_rows: [rows], of `row_weights`.
        rows: int64, the row of each token, as an index into `weights_of_rows`; any shape, e.g. packed [tokens].
        mask: the shape of `rows`.

    Returns:
        float32, the shape of `rows`.
    """
    return select(weights_of_rows[rows], mask)


def aggregate(losses: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · loss over these tokens, a float32 scalar.

    Summed over micro-batches, data- and context-parallel ranks it is the loss of the mini-batch, and its
    gradient the loss's: nothing may scale either again. Losses of weight 0 are not read.

    Args:
        losses: any shape.
        weights: the shape of `losses`, of `token_weights`.
    """
    return (select(losses, weights != 0) * weights).sum()


_ROW_DENOMINATORS: dict[str, Callable[[Tensor, Denominators, float], Tensor]] = {
    "token-mean": lambda lengths, of, scale: torch.full_like(lengths, of.tokens),
    "token-sum": lambda lengths, of, scale: torch.ones_like(lengths),
    "seq-mean-token-sum": lambda lengths, of, scale: torch.full_like(lengths, of.rows),
    "seq-mean-token-mean": lambda lengths, of, scale: lengths * of.rows,
    "seq-mean-token-sum-norm": lambda lengths, of, scale: torch.full_like(lengths, of.rows * scale),
}
