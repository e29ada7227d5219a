"""The same numbers as verl's own functions, where verl is installed (it needs ray to be imported)."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

core = pytest.importorskip("verl.trainer.ppo.core_algos")
correction = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOptions, advantage_estimator  # noqa: E402
from megarl.algorithms.aggregate import Denominators, aggregate, row_weights, token_weights  # noqa: E402
from megarl.algorithms.filters import resampling_weights  # noqa: E402
from megarl.algorithms.kl import kl_per_token  # noqa: E402
from megarl.algorithms.kl_reward import AdaptiveKL  # noqa: E402
from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, policy_loss  # noqa: E402
from megarl.algorithms.rollout_correction import RolloutCorrectionOptions, correct, finish  # noqa: E402
from megarl.algorithms.value_loss import value_loss  # noqa: E402
from megarl.config.schema_learning import LOSS_AGG_MODES  # noqa: E402

ROWS, TIME = 24, 37
VERL_NAMES = {"ppo": "vanilla", "gmpo": "geo_mean", "reinforce": "gpg"}


def _mask() -> Tensor:
    """Uneven rows with tool spans, every row with valid tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, TIME + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(TIME) < lengths) & (torch.rand(ROWS, TIME, generator=generator) < 0.8)
    mask[:, 0] = True
    return mask.long()


def _random(seed: int) -> Tensor:
    return torch.randn(ROWS, TIME, generator=torch.Generator().manual_seed(seed))


def _outcomes() -> Tensor:
    """Rewards on the last valid token: verl's row estimators know no others."""
    mask = _mask()
    last = TIME - 1 - mask.flip(1).argmax(dim=1)
    rewards = torch.zeros(ROWS, TIME)
    rewards[torch.arange(ROWS), last] = _random(1)[:, 0].round(decimals=1)
    return rewards


def _inputs(rewards: Tensor) -> AdvantageInputs:
    """Groups of four."""
    return AdvantageInputs(
        rewards=rewards,
        mask=_mask(),
        groups=torch.arange(ROWS) // 4,
        values=_random(2),
        baseline=_random(3)[:, 0],
        rewards_by_name={"score": rewards.sum(1)},
    )


def _assert_same(ours: Tensor, theirs: Tensor, **tolerance: float) -> None:
    valid = _mask().bool()
    torch.testing.assert_close(ours[valid], theirs[valid].float(), **(tolerance or {"rtol": 2e-5, "atol": 2e-6}))


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline", "reinforce_plus_plus"]
)
def test_advantages_and_returns_are_verls(name: str) -> None:
    inputs = _inputs(_outcomes())
    ours = advantage_estimator.get(name)(inputs, AdvantageOptions(gamma=0.97))
    arguments: dict[str, Any] = {
        "token_level_rewards": inputs.rewards.clone(),
        "response_mask": inputs.mask,
        "config": AlgoConfig(gamma=0.97),
    }
    if name != "reinforce_plus_plus":
        arguments["index"] = inputs.groups.numpy()
    advantages, returns = core.get_adv_estimator_fn(name)(**arguments)
    _assert_same(ours.advantages, advantages)
    _assert_same(ours.returns, returns)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_with_token_rewards_and_tool_spans_is_verls(gamma: float, lam: float) -> None:
    mask = _mask()
    inputs = _inputs(_random(5) * mask)
    ours = advantage_estimator.get("gae")(inputs, AdvantageOptions(gamma=gamma, lam=lam))
    advantages, returns = core.compute_gae_advantage_return(inputs.rewards, inputs.values, mask, gamma, lam)
    _assert_same(ours.advantages, advantages)
    _assert_same(ours.returns, returns)


def test_remax_is_verls() -> None:
    inputs = _inputs(_random(5) * _mask())
    ours = advantage_estimator.get("remax")(inputs, AdvantageOptions())
    advantages, returns = core.get_adv_estimator_fn("remax")(inputs.rewards, inputs.baseline, inputs.mask)
    _assert_same(ours.advantages, advantages)
    _assert_same(ours.returns, returns)


def test_dr_grpo_is_verls() -> None:
    inputs = _inputs(_outcomes())
    ours = advantage_estimator.get("grpo")(inputs, AdvantageOptions(norm_adv_by_std=False))
    theirs, _ = core.compute_grpo_outcome_advantage(
        inputs.rewards.clone(), inputs.mask, inputs.groups.numpy(), norm_adv_by_std_in_grpo=False
    )
    _assert_same(ours.advantages, theirs)


def _actor(name: str, rows: int) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
    )
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(_mask().sum()), global_batch_size=rows)
    return config


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sapo", "reinforce", "gmpo"])
def test_policy_loss_and_its_gradient_are_verls(name: str) -> None:
    mask = _mask()
    old, advantages = -_random(6).abs(), _random(7)[:, :1].expand(ROWS, TIME)
    mode = policy_loss.traits(name).loss_agg_mode or "token-mean"
    leaves = [(old + 0.4 * _random(8)).requires_grad_() for _ in range(2)]
    options = PolicyLossOptions(clip_ratio_low=0.2, clip_ratio_high=0.28)
    inputs = PolicyLossInputs(logprobs=leaves[0], old_logprobs=old, advantages=advantages, mask=mask)
    result = policy_loss.get(name)(inputs, options)
    ours = _aggregated(result.loss, mode)
    theirs, metrics = core.get_policy_loss_fn(VERL_NAMES.get(name, name))(
        old, leaves[1], advantages, mask, mode, _actor(name, ROWS)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip((ours, theirs), leaves, strict=True)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    if name != "gmpo":  # which counts both sides of the clip, of which the loss has one
        for key in metrics.keys() & result.sums.keys():
            assert result.sums[key].item() / mask.sum().item() == pytest.approx(metrics[key], abs=1e-5)


def _aggregated(losses: Tensor, mode: str) -> Tensor:
    mask = _mask()
    lengths = mask.sum(1)
    rows = torch.arange(ROWS).unsqueeze(1).expand(ROWS, TIME)
    weights = row_weights(mode, lengths, Denominators.of(lengths), loss_scale_factor=TIME)
    return aggregate(losses, token_weights(weights, rows, mask))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_aggregation_is_verls(mode: str) -> None:
    theirs = core.agg_loss(_random(9), _mask(), mode, loss_scale_factor=TIME)
    torch.testing.assert_close(_aggregated(_random(9), mode), theirs, rtol=1e-5, atol=1e-6)


def test_value_loss_is_verls() -> None:
    mask, old, returns = _mask(), _random(10), _random(11)
    leaves = [_random(12).requires_grad_() for _ in range(2)]
    result = value_loss(leaves[0], old, returns, mask, 0.5)
    ours = _aggregated(result.loss, "token-mean")
    theirs, clipped = core.compute_value_loss(leaves[1], returns, old, mask, 0.5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip((ours, theirs), leaves, strict=True)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)
    assert result.sums["critic/vf_clipfrac"].item() / mask.sum().item() == pytest.approx(clipped.item())


@pytest.mark.parametrize("estimator", ["k1", "k1+", "k2", "k3", "k3+", "low_var_kl", "abs", "abs+"])
def test_kl_estimates_and_gradients_are_verls(estimator: str) -> None:
    leaves = [(_random(13) * 3).requires_grad_() for _ in range(2)]
    ours = kl_per_token(leaves[0], _random(14), torch.ones(ROWS, TIME), estimator)
    theirs = core.kl_penalty(leaves[1], _random(14), estimator)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(kl.sum(), leaf)[0] for kl, leaf in zip((ours, theirs), leaves, strict=True)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_the_adaptive_controller_is_verls() -> None:
    ours = AdaptiveKL(beta=0.02, target=0.1, horizon=1000)
    theirs = core.AdaptiveKLController(0.02, 0.1, 1000)
    for kl in (0.11, 0.5, 0.0, 0.09):
        ours.update(kl, 64)
        theirs.update(kl, 64)
    assert ours.beta == pytest.approx(theirs.value, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lower", [None, 0.7])
def test_correction_weights_and_metrics_are_verls(level: str, lower: float | None) -> None:
    mask, trainer = _mask(), -_random(15).abs()
    engine = trainer + 0.2 * _random(16)
    options = RolloutCorrectionOptions(rollout_is=level, rollout_is_threshold=1.5, rollout_is_lower=lower)
    result = correct(trainer, engine, mask, options)
    weights, _, metrics = correction.compute_rollout_correction_and_rejection_mask(
        old_log_prob=trainer,
        rollout_log_prob=engine,
        response_mask=mask,
        rollout_is=level,
        rollout_is_threshold=1.5 if lower is None else f"{lower}_1.5",
    )
    _assert_same(result.weights, weights.batch["rollout_is_weights"], rtol=1e-5, atol=1e-6)
    number = lambda values: {key: value.item() for key, value in values.items()}
    ours = finish(number(result.sums), number(result.maxima), options)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "rollout_is_mean", "rollout_is_eff_sample_size"):
        key = f"rollout_corr/{name}"
        assert ours[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("rule", ["token_k1", "token_k2", "token_k3", "sequence_k1", "sequence_k2", "sequence_k3"])
def test_rejected_tokens_are_verls(rule: str) -> None:
    mask, trainer = _mask(), -_random(17).abs()
    engine = trainer + 0.3 * _random(18)
    threshold = {"token_k1": 1.4, "sequence_k1": 1.05}.get(rule, 0.045)
    ours = correct(
        trainer, engine, mask, RolloutCorrectionOptions(rollout_rs=rule, rollout_rs_threshold=threshold)
    ).mask
    theirs, _ = correction.compute_rollout_rejection_mask(
        trainer - engine, mask, rule.replace("sequence", "seq_mean"), str(threshold)
    )
    assert torch.equal(ours, theirs.bool()) and 0 < ours.sum() < mask.sum()


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_pf_ppo_draws_what_verl_draws(method: str) -> None:
    """verl has no function for the weights alone, so its draws are compared, from one seed."""
    protocol = pytest.importorskip("verl.protocol")
    scores = torch.zeros(50, 2)
    scores[:, 0] = torch.arange(50).float() % 7 - 3
    numbers = torch.arange(50)
    data = protocol.DataProto.from_dict(
        tensors={"token_level_scores": scores, "number": numbers}, non_tensors={"n": numpy.arange(50, dtype=object)}
    )
    torch.manual_seed(4)
    theirs = core.compute_pf_ppo_reweight_data(data, method, 2.0).batch["number"]
    torch.manual_seed(4)
    weights = resampling_weights(scores.sum(1), method, 2.0)
    ours = torch.multinomial((weights + 1e-8).float(), 50, replacement=True)
    assert torch.equal(ours, theirs)
