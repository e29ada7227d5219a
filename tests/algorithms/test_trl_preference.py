"""The same preference losses and gradients as TRL's trainers compute, where TRL is installed."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer")
kto_trainer = pytest.importorskip("trl.trainer.kto_trainer")

from megarl.algorithms.preference import (  # noqa: E402
    LabelledInputs,
    PairInputs,
    PreferenceOptions,
    Responses,
    kto_baseline,
    preference_loss,
)

PAIRS, TIME, PROMPT = 6, 13, 3
BETA, SMOOTHING = 0.2, 0.15
DESIRABLE_WEIGHT, UNDESIRABLE_WEIGHT = 1.2, 0.9


class _Everything(SimpleNamespace):
    """A trainer that is asked for its loss alone: whatever else it reads is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _tokens(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs of predicted tokens [rows, TIME − 1], which tokens are a response's [rows, TIME], sums under the
    reference [rows])."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, TIME - PROMPT + 1, (rows, 1), generator=generator)
    places = torch.arange(TIME)
    mask = ((places >= PROMPT) & (places < PROMPT + lengths)).long()
    logprobs = -torch.rand(rows, TIME - 1, generator=generator) * mask[:, 1:]
    reference = logprobs.sum(1) + torch.randn(rows, generator=generator)
    return logprobs, mask, reference


def _model(logprobs: Tensor) -> Any:
    """Gives these log-probs, whatever it is asked."""
    zeros = torch.zeros_like(logprobs)
    output = _Everything(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    return lambda **_: output


def _trainer(**settings: Any) -> _Everything:
    identity = lambda values, **_: values
    return _Everything(
        beta=BETA,
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=identity, gather_for_metrics=identity),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def _trls_dpo(loss_type: str, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """(loss, gradient) of TRL's own method over the pairs of `rows`."""
    logprobs, mask, reference = (_of_pairs(each, rows) for each in _tokens(2 * PAIRS))
    logprobs.requires_grad_()
    trainer = _trainer(
        loss_types=[loss_type], loss_weights=[1.0], label_smoothing=SMOOTHING, f_divergence_type="reverse_kl"
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": reference[: len(reference) // 2],
        "ref_rejected_logps": reference[len(reference) // 2 :],
    }
    loss = dpo_trainer.DPOTrainer._compute_loss(trainer, _model(logprobs), inputs, False)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def _of_pairs(values: Tensor, rows: slice) -> Tensor:
    """TRL's order: all chosen, then all rejected."""
    return torch.cat([values[:PAIRS][rows], values[PAIRS:][rows]])


def _ours(name: str, options: PreferenceOptions, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    logprobs, mask, reference = (_of_pairs(each, rows) for each in _tokens(2 * PAIRS))
    logprobs.requires_grad_()
    sums, tokens = logprobs.sum(1), mask.sum(1)
    half = len(sums) // 2
    chosen, rejected = (
        Responses(logprobs=sums[side], reference_logprobs=reference[side], tokens=tokens[side])
        for side in (slice(0, half), slice(half, None))
    )
    inputs = PairInputs(
        chosen=chosen, rejected=rejected, chosen_win_rate=torch.ones(half), rejected_win_rate=torch.zeros(half)
    )
    loss = preference_loss.get(name)(inputs, options).mean()
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def _assert_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "loss_type"), [("dpo", "sigmoid"), ("spin", "sigmoid"), ("ipo", "ipo"), ("sppo", "sppo_hard")]
)
def test_loss_and_gradient_are_trls(name: str, loss_type: str) -> None:
    _assert_close(_ours(name, PreferenceOptions(beta=BETA)), _trls_dpo(loss_type))


def test_label_smoothing_is_that_of_trls_aot_which_over_a_single_pair_is_conservative_dpo() -> None:
    """TRL's `sigmoid` has no label smoothing any more, and its `robust` is another estimator."""
    options = PreferenceOptions(beta=BETA, label_smoothing=SMOOTHING)
    for pair in range(PAIRS):
        rows = slice(pair, pair + 1)
        _assert_close(_ours("dpo", options, rows), _trls_dpo("aot", rows))


def test_kto_is_trls_on_one_device() -> None:
    logprobs, mask, reference = _tokens(PAIRS)
    logprobs.requires_grad_()
    desirable = torch.arange(PAIRS) % 3 != 1
    mismatched = torch.linspace(-1, 3, PAIRS)
    weights = {"desirable_weight": DESIRABLE_WEIGHT, "undesirable_weight": UNDESIRABLE_WEIGHT}
    trainer = _trainer(
        loss_type="kto", calculate_KL=True, _compute_kl_logps=lambda model, batch: reference + mismatched, **weights
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": desirable,
        "ref_logps": reference,
        "ref_KL_logps": reference,
    }
    loss = kto_trainer.KTOTrainer._compute_loss(trainer, _model(logprobs), inputs, False)
    theirs = loss.detach(), torch.autograd.grad(loss, logprobs)[0]
    responses = Responses(logprobs=logprobs.sum(1), reference_logprobs=reference, tokens=mask.sum(1))
    labelled = LabelledInputs(responses=responses, desirable=desirable, kl=kto_baseline(mismatched))
    ours = preference_loss.get("kto")(labelled, PreferenceOptions(beta=BETA, **weights)).mean()
    _assert_close((ours.detach(), torch.autograd.grad(ours, logprobs)[0]), theirs)
