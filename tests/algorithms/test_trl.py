"""The same losses and gradients as TRL's trainers compute, where TRL is installed."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
gmpo_trainer = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer")

from megarl.algorithms.aggregate import Denominators, aggregate, row_weights, token_weights  # noqa: E402
from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, policy_loss  # noqa: E402

ROWS, TIME = 10, 21
LOW, HIGH = 0.2, 0.28


class _Everything(SimpleNamespace):
    """A trainer that is asked for its loss alone: whatever else it reads is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _tokens() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probs, old log-probs, advantages of rows, mask)."""
    generator = torch.Generator().manual_seed(3)
    random = lambda *shape: torch.randn(*shape, generator=generator)
    old = -random(ROWS, TIME).abs()
    lengths = torch.randint(3, TIME + 1, (ROWS, 1), generator=generator)
    return old + 0.4 * random(ROWS, TIME), old, random(ROWS), (torch.arange(TIME) < lengths).long()


def _trls(trainer_class: type, loss_type: str, level: str, high: float = HIGH) -> tuple[Tensor, Tensor]:
    """(loss, gradient) of the trainer's own method, with the model's log-probs given."""
    logprobs, old, advantages, mask = _tokens()
    logprobs.requires_grad_()
    identity = lambda values, **_: values
    trainer = _Everything(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=LOW,
        epsilon_high=high,
        beta=0.0,
        top_entropy_quantile=1.0,
        current_gradient_accumulation_steps=1,
        max_completion_length=TIME,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        args=_Everything(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=identity, gather_for_metrics=identity, reduce=identity),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros(ROWS, TIME), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1).long(),
        "prompt_mask": torch.ones(ROWS, 1).long(),
        "completion_ids": torch.zeros(ROWS, TIME).long(),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer_class._compute_loss(trainer, None, inputs)  # type: ignore[attr-defined]
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def _ours(name: str, mode: str, options: PolicyLossOptions) -> tuple[Tensor, Tensor]:
    logprobs, old, advantages, mask = _tokens()
    logprobs.requires_grad_()
    inputs = PolicyLossInputs(
        logprobs=logprobs, old_logprobs=old, advantages=advantages.unsqueeze(1).expand(ROWS, TIME), mask=mask
    )
    lengths = mask.sum(1)
    weights = row_weights(mode, lengths, Denominators.of(lengths), loss_scale_factor=TIME)
    rows = torch.arange(ROWS).unsqueeze(1).expand(ROWS, TIME)
    loss = aggregate(policy_loss.get(name)(inputs, options).loss, token_weights(weights, rows, mask))
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


NO_DUAL_CLIP = PolicyLossOptions(clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=1e9)


@pytest.mark.parametrize(
    ("name", "loss_type", "level", "mode"),
    [
        ("ppo", "grpo", "token", "seq-mean-token-mean"),
        ("ppo", "dapo", "token", "token-mean"),
        ("ppo", "dr_grpo", "token", "seq-mean-token-sum-norm"),
        ("gspo", "grpo", "sequence", "seq-mean-token-mean"),
        ("sapo", "sapo", "token", "seq-mean-token-mean"),
    ],
)
def test_loss_and_gradient_are_trls(name: str, loss_type: str, level: str, mode: str) -> None:
    theirs = _trls(grpo_trainer.GRPOTrainer, loss_type, level)
    for found, expected in zip(_ours(name, mode, NO_DUAL_CLIP), theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_gmpo_is_trls() -> None:
    theirs = _trls(gmpo_trainer.GMPOTrainer, "grpo", "token")
    for found, expected in zip(_ours("gmpo", "seq-mean-token-mean", NO_DUAL_CLIP), theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_cispo_is_trls_whose_bound_is_the_ratio_itself() -> None:
    theirs = _trls(grpo_trainer.GRPOTrainer, "cispo", "token", high=1.28)
    ours = _ours("cispo", "token-mean", PolicyLossOptions(clip_ratio_low=1.0, clip_ratio_high=HIGH))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
