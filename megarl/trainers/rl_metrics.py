"""The metrics of an RL step, all named in docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.advantages import Advantages
from megarl.algorithms.rollout_correction import RolloutCorrection, RolloutCorrectionOptions, correct, finish
from megarl.data.sample import Sample
from megarl.models.train import StepResult, TrainableModel
from megarl.observe.flops import UPDATE_PASSES, performance
from megarl.observe.reduce import Kind, MetricSums
from megarl.parallel.groups import Groups
from megarl.rewards.outcome import SCORE, FailureKind
from megarl.trainers.exchange import SampleTable
from megarl.trainers.minibatch import MiniBatch
from megarl.trainers.policy import MASK, OLD, POLICY_METRICS, ROLLOUT, UNREJECTED
from megarl.trainers.prepare import TokenAdvantages, explained_variance
from megarl.trainers.token_rows import TokenRows
from megarl.trainers.update_watch import Add
from megarl.weights.bucket_stream import Traffic

if TYPE_CHECKING:
    from megarl.trainers.rl_parts import RLParts

_POLICY_MEANS = (*POLICY_METRICS, "actor/entropy")
_POLICY_LOSSES = ("actor/pg_loss", "actor/kl_loss")
_CRITIC_MEANS = ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")
_OF_TOKENS = ("critic/advantages", "critic/returns", "critic/values", "critic/rewards")

_GAP = "rollout_corr/"
"""Before the sums and maxima that `rollout_correction.finish` makes metrics of."""

_GAP_SUMS = (
    "tokens",
    "rows",
    "logprob_diff",
    "kl",
    "k3_kl",
    "training_nll",
    "rollout_nll",
    "token_ratio_squared",
    "row_ratio_squared",
    "weight",
    "weight_squared",
    "outside",
    "rejected",
)

KINDS: dict[str, Kind] = {
    **dict.fromkeys((*_POLICY_MEANS, *_POLICY_LOSSES, *_CRITIC_MEANS), "mean"),
    **{f"{name}/{kind}": kind for name in _OF_TOKENS for kind in ("mean", "max", "min")},
    "critic/kl": "mean",
    "critic/vf_explained_var": "mean",
    "group/count": "max",
    "group/singleton": "max",
    "group/equal_rewards": "max",
    "training/rollout_probs_diff_mean": "mean",
    "training/rollout_probs_diff_max": "max",
    **dict.fromkeys((f"{_GAP}{name}" for name in _GAP_SUMS), "sum"),
    f"{_GAP}logprob_diff_max": "max",
    "batch/padding_fraction": "mean",
    "sync/bytes": "sum",
    "sync/received_bytes": "max",
    "sync/buckets": "max",
    "reward/scored": "sum",
    "reward/failed": "sum",
    **dict.fromkeys((f"reward/failed/{kind}" for kind in FailureKind), "sum"),
}
"""What ranks reduce; the rest comes from the table, which every rank has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What a step leaves for its metrics."""

    table: SampleTable
    batches: list[MiniBatch]
    by_row: Advantages | None
    """Advantages of samples, known before the passes; None: `by_token`."""
    by_token: TokenAdvantages | None
    """On the last stage, where advantages had to wait for the passes."""
    results: list[StepResult]
    """The actor's updates; none while the critic warms up."""
    critic_results: list[StepResult]
    traffic: Traffic | None
    """Of the sync on this rank; None: there was none."""


def step_metrics(parts: RLParts, outcome: StepOutcome) -> dict[str, float]:
    """Every metric of a step but its times. Collective over the world; the same on every rank."""
    sums, groups = parts.metrics, parts.groups
    if groups.is_last_stage:
        # These take collectives of their own, so every rank of the stage comes along; one records.
        gap = _engine_gap(parts, outcome.batches)
        explained = _explained_variance(outcome.by_token, groups)
        # Tensor-parallel ranks know the same; context-parallel ranks each know their tokens.
        if groups.tp.rank() == 0:
            _add_updates(parts, outcome)
            if groups.cp.rank() == 0:
                _add_gap(sums, gap)
                _add_token_advantages(sums, outcome.by_token, explained)
    if groups.is_first_stage and groups.tp.rank() == 0 and groups.cp.rank() == 0:
        for mini_batch in outcome.batches:
            padding = mini_batch.padded_tokens - mini_batch.real_tokens
            sums.add("batch/padding_fraction", padding, count=mini_batch.padded_tokens)
    if outcome.traffic is not None:
        sums.add("sync/bytes", outcome.traffic.taken)
        sums.add("sync/received_bytes", outcome.traffic.received)
        sums.add("sync/buckets", outcome.traffic.buckets)
    for name, value in parts.generator.metrics().items():
        sums.add(name, value)
    reduced = sums.reduce(groups.world)
    group_metrics = _group_metrics(reduced)
    corr = {name: reduced.pop(name) for name in list(reduced) if name.startswith(_GAP)}
    return {
        **_finished_gap(corr, parts.correction),
        **_summary("critic/rewards", outcome.table.score),
        **table_metrics(parts, outcome.table),
        **reduced,
        **group_metrics,
        **({} if outcome.by_row is None else _row_advantage_metrics(outcome.table, outcome.by_row)),
        **_optimizer_metrics("actor", parts.actor, outcome.results),
        **({} if parts.critic is None else _optimizer_metrics("critic", parts.critic, outcome.critic_results)),
        **({} if parts.kl_controller is None else {"critic/kl_coeff": parts.kl_controller.beta}),
        "batch/imbalance": _imbalance(outcome.batches),
        **parts.actor.router_metrics(),
        **_of_critic({} if parts.critic is None else parts.critic.router_metrics()),
    }


def _of_critic(metrics: dict[str, float]) -> dict[str, float]:
    return {f"critic/{name}": value for name, value in metrics.items()}


def reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`reward/<name>/mean` of what reward functions returned beside the score. Collective over the world."""
    mine: dict[str, tuple[float, int]] = {}
    for sample in samples:
        for name, value in sample.rewards.items():
            if name != SCORE:
                total, count = mine.get(name, (0.0, 0))
                mine[name] = (total + value, count + 1)
    everyones: list[dict[str, tuple[float, int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, mine)
    names = sorted({name for part in everyones for name in part})
    found = {name: [part[name] for part in everyones if name in part] for name in names}
    return {f"reward/{name}/mean": sum(t for t, _ in parts) / sum(c for _, c in parts) for name, parts in found.items()}


def performance_metrics(parts: RLParts, outcome: StepOutcome, seconds: float) -> dict[str, float]:
    """Throughput and MFU of a step. Samples that are left out of the update are tokens, but no work of it."""
    config, table, batches = parts.config, outcome.table, outcome.batches
    forward = sum(sum(mini_batch.work) for mini_batch in batches)
    passes = forward * UPDATE_PASSES * config.actor.ppo_epochs * bool(outcome.results)
    passes += forward * (len(batches) * config.actor.ppo_epochs > 1 or parts.needs.old_logprobs)
    passes += forward * (parts.reference is not None)
    if parts.critic is not None:
        # As of the actor: a critic of another size is counted as if it had the actor's.
        passes += forward * (1 + UPDATE_PASSES * config.critic.ppo_epochs)
    if parts.collector.generates:
        passes += parts.flops.generation(
            table.prompt_length.tolist(), table.response_length.tolist(), samples_per_prompt=config.rollout.n
        )
    return performance(
        flops=passes,
        tokens=float(table.total_length.sum()),
        seconds=seconds,
        world_size=parts.groups.layout.world_size,
        peak_tflops=parts.peak_tflops,
    )


def add_update_of_actor(parts: RLParts, mini_batch: MiniBatch, add: Add, outputs: Sequence[dict[str, Any]]) -> None:
    """What the guards may ask about an update of the actor: its own metrics, and the gap between engine and trainer."""
    groups = parts.groups
    if groups.is_last_stage and groups.tp.rank() == 0:
        _add_policy_losses(parts, add, updates=1)
        _add_outputs(add, outputs)
        for batch, output in zip(mini_batch.batches, outputs, strict=True):
            valid = batch.columns[MASK].bool()
            gap = (output[OLD] - batch.columns[ROLLOUT])[valid].abs()
            if not gap.isnan().any():
                add("rollout_corr/logprob_diff_mean", gap.double().sum(), gap.numel())


def add_update_of_critic(parts: RLParts, add: Add, outputs: Sequence[dict[str, Any]]) -> None:
    """What the guards may ask about an update of the critic."""
    if parts.groups.is_last_stage and parts.groups.tp.rank() == 0:
        _add_outputs(add, outputs)


def _add_updates(parts: RLParts, outcome: StepOutcome) -> None:
    if outcome.results:
        _add_policy_losses(parts, parts.metrics.add, updates=len(outcome.results))
    for result in (*outcome.results, *outcome.critic_results):
        _add_outputs(parts.metrics.add, result.outputs)


def _add_policy_losses(parts: RLParts, add: Add, *, updates: int) -> None:
    """Of losses, the outputs hold shares that sum up to the mini-batch's: what they are means over are updates."""
    if parts.groups.dp.rank() == 0 and parts.groups.cp.rank() == 0:
        for name in _POLICY_LOSSES:
            if name != "actor/kl_loss" or parts.config.actor.use_kl_loss:
                add(name, 0.0, updates)


def _add_outputs(add: Add, outputs: Sequence[dict[str, Any]]) -> None:
    for output in outputs:
        for name, share in output["sums"].items():
            add(name, share, 0 if name in _POLICY_LOSSES else output["tokens"])


def _add_token_advantages(sums: MetricSums, found: TokenAdvantages | None, explained: float | None) -> None:
    """Of this data-parallel rank's tokens."""
    if found is None:
        return
    valid = found.mask.bool()
    columns = {"critic/advantages": found.advantages, "critic/returns": found.returns, "critic/values": found.values}
    for name, values in columns.items():
        if values is not None:
            for kind in ("mean", "max", "min"):
                sums.add_values(f"{name}/{kind}", values[valid])
    for kind in ("mean", "max", "min"):
        sums.add_values(f"critic/rewards/{kind}", found.rewards.sum(dim=1))
    for name, count in found.counts.items():
        sums.add(name, count)
    if found.kl is not None:
        sums.add("critic/kl", found.kl)
    if explained is not None:
        sums.add("critic/vf_explained_var", explained)


def _explained_variance(found: TokenAdvantages | None, groups: Groups) -> float | None:
    return None if found is None or found.values is None else explained_variance(found, groups)


def _engine_gap(parts: RLParts, batches: Sequence[MiniBatch]) -> tuple[RolloutCorrection, Tensor] | None:
    """How far engine and trainer were apart before the update, and |difference| of their probabilities [tokens].

    Collective over context-parallel ranks. None where it is not known: while the critic warms up, or where the data
    brought no log-probs.
    """
    if any(OLD not in batch.columns for mini_batch in batches for batch in mini_batch.batches):
        return None
    rows = TokenRows(batches, parts.groups)
    mask = rows.get(MASK if parts.correction.rollout_rs == "none" else UNREJECTED)
    old, engine = rows.get(OLD), rows.get(ROLLOUT)
    valid = mask.bool()
    if engine[valid].isnan().any():
        return None
    return correct(old, engine, mask, parts.correction), (old[valid].exp() - engine[valid].exp()).abs()


def _add_gap(sums: MetricSums, gap: tuple[RolloutCorrection, Tensor] | None) -> None:
    if gap is None:
        return
    found, differences = gap
    for name, value in (*found.sums.items(), *found.maxima.items()):
        sums.add(f"{_GAP}{name}", value)
    for kind in ("mean", "max"):
        sums.add_values(f"training/rollout_probs_diff_{kind}", differences)


def _finished_gap(reduced: dict[str, float], options: RolloutCorrectionOptions) -> dict[str, float]:
    if f"{_GAP}logprob_diff_max" not in reduced:
        return {}
    plain = {name.removeprefix(_GAP): value for name, value in reduced.items()}
    return finish(plain, plain, options)


def _optimizer_metrics(name: str, model: TrainableModel, results: Sequence[StepResult]) -> dict[str, float]:
    if not results:
        return {}
    finite = [result.grad_norm for result in results if math.isfinite(result.grad_norm)]
    return {
        f"{name}/grad_norm": float(numpy.mean(finite)) if finite else float("nan"),
        f"{name}/skipped_updates": float(len(results) - len(finite)),
        f"{name}/lr": float(model.optimizer.param_groups[0]["lr"]),
    }


def table_metrics(parts: RLParts, table: SampleTable) -> dict[str, float]:
    """What is known before any pass, the same on every rank."""
    limit = parts.config.data.max_prompt_length
    return {
        **_summary("critic/score", table.score),
        **_summary("response_length", table.response_length),
        "response_length/clip_ratio": float(table.cut_off.mean()),
        **_summary("prompt_length", table.prompt_length),
        "prompt_length/clip_ratio": float((table.prompt_length >= limit).mean()),
    }


def _row_advantage_metrics(table: SampleTable, found: Advantages) -> dict[str, float]:
    weights = table.response_tokens
    values = found.advantages.squeeze(1).double().numpy()
    return {
        "critic/advantages/mean": float((values * weights).sum() / max(weights.sum(), 1)),
        "critic/advantages/max": float(values.max()),
        "critic/advantages/min": float(values.min()),
        **_group_metrics({name: float(count) for name, count in found.counts.items()}),
    }


def _group_metrics(counts: dict[str, float]) -> dict[str, float]:
    """Of estimators that compare the samples of a prompt. Takes the counts out."""
    groups = counts.pop("group/count", None)
    equal = counts.pop("group/equal_rewards", 0.0)
    singleton = counts.pop("group/singleton", 0.0)
    if groups is None:
        return {}
    return {"group/singleton": singleton, "group/zero_variance_fraction": equal / max(groups, 1.0)}


def _imbalance(mini_batches: Sequence[MiniBatch]) -> float:
    """Work of the busiest data-parallel rank over the mean, by estimated FLOPs; mini-batches wait for one another."""
    mean = sum(sum(mini_batch.work) / len(mini_batch.work) for mini_batch in mini_batches)
    return sum(max(mini_batch.work) for mini_batch in mini_batches) / mean if mean else 1.0


def _summary(name: str, values: numpy.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
