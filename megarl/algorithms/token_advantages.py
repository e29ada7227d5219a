"""Advantages that differ along a response: sums of what follows a token."""

from __future__ import annotations

import torch

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOptions, Advantages, advantage_estimator
from megarl.algorithms.backward_sums import discounted_sums
from megarl.algorithms.tokens import row_chunks, select
from megarl.algorithms.whitening import whiten


@advantage_estimator("gae", needs_values=True)
def gae(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """Generalised advantage estimation: L_t = δ_t + γλ·L_{t+1} with δ_t = r_t + γ·V_{t+1} − V_t; return_t = L_t + V_t.

    t counts valid tokens only: V and L after a span of observations are those of the token behind it, and after the
    last token both are 0. With `normalize_advantages` the advantage is whiten(L) over the global batch, otherwise L.

    Raises:
        ValueError: there are no values.

    arXiv:1506.02438.
    """
    if inputs.values is None:
        raise ValueError("algorithm.adv_estimator gae needs the values of a critic")
    mask = inputs.mask.bool()
    advantages = discounted_sums(inputs.rewards, mask, options.gamma * options.lam, inputs.values, options.gamma)
    returns = torch.empty_like(advantages)
    for chunk, sums, values, valid in row_chunks(returns, advantages, inputs.values, mask):
        chunk.copy_(select(sums + values, valid))
    if options.normalize_advantages:
        advantages = whiten(advantages, mask, inputs.ranks)
    return Advantages(advantages=advantages, returns=returns)


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """G_t = r_t + γ·G_{t+1} over valid tokens; A = whiten(G) over the global batch. REINFORCE++, arXiv:2501.03262."""
    mask = inputs.mask.bool()
    returns = discounted_sums(inputs.rewards, mask, options.gamma)
    return Advantages(advantages=whiten(returns, mask, inputs.ranks), returns=returns)


@advantage_estimator("remax", needs_baseline=True)
def remax(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """A_t = Σ_{s ≥ t} r_s − reward of the greedy response to the same prompt, undiscounted. ReMax, arXiv:2310.10505.

    Raises:
        ValueError: there is no baseline.
    """
    if inputs.baseline is None:
        raise ValueError("algorithm.adv_estimator remax needs the reward of each prompt's greedy response")
    returns = discounted_sums(inputs.rewards, inputs.mask, 1.0)
    advantages = select(returns - inputs.baseline.float().unsqueeze(1), inputs.mask)
    return Advantages(advantages=advantages, returns=returns)
