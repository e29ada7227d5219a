"""The metrics of an RL step, all named in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch.distributed as dist

from megarl.algorithms.advantages import Advantages
from megarl.data.sample import Sample
from megarl.models.train import StepResult
from megarl.observe.flops import UPDATE_PASSES, performance
from megarl.observe.reduce import Kind
from megarl.rewards.outcome import SCORE, FailureKind
from megarl.trainers.exchange import SampleTable
from megarl.trainers.minibatch import MiniBatch

if TYPE_CHECKING:
    from megarl.trainers.rl_parts import RLParts

_TOKEN_MEANS = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/entropy")
_LOSSES = ("actor/pg_loss", "actor/kl_loss")

KINDS: dict[str, Kind] = {
    **dict.fromkeys(_TOKEN_MEANS, "mean"),
    **dict.fromkeys(_LOSSES, "mean"),
    "training/rollout_probs_diff_mean": "mean",
    "training/rollout_probs_diff_max": "max",
    "training/rollout_kl_k3": "mean",
    "batch/padding_fraction": "mean",
    "sync/bytes": "sum",
    "reward/scored": "sum",
    "reward/failed": "sum",
    **dict.fromkeys((f"reward/failed/{kind}" for kind in FailureKind), "sum"),
}
"""What ranks reduce; the rest comes from the table, which every rank has."""


def step_metrics(
    parts: RLParts,
    table: SampleTable,
    advantages: Advantages,
    mini_batches: Sequence[MiniBatch],
    results: Sequence[StepResult],
    synced_bytes: int,
) -> dict[str, float]:
    """Every metric of a step but its times. Collective over the world; the same on every rank."""
    sums = parts.metrics
    _add_update(parts, mini_batches, results)
    sums.add("sync/bytes", synced_bytes)
    for name, value in parts.generator.rewards.metrics().items() if parts.replay is None else ():
        sums.add(name, value)
    reduced = sums.reduce(parts.groups.world)
    finite = [result.grad_norm for result in results if result.updated]
    return {
        **reduced,
        "actor/grad_norm": float(numpy.mean(finite)) if finite else float("nan"),
        "actor/skipped_updates": float(len(results) - len(finite)),
        "actor/lr": float(parts.actor.optimizer.param_groups[0]["lr"]),
        **_table_metrics(parts, table),
        **_advantage_metrics(table, advantages),
        "batch/imbalance": _imbalance(mini_batches),
    }


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


def performance_metrics(
    parts: RLParts, table: SampleTable, mini_batches: Sequence[MiniBatch], seconds: float
) -> dict[str, float]:
    """Throughput and MFU of a step. Samples that are left out of the update are tokens, but no work of it."""
    config = parts.config
    forward = sum(sum(mini_batch.work) for mini_batch in mini_batches)
    passes = forward * UPDATE_PASSES * config.actor.ppo_epochs
    passes += forward * (len(mini_batches) * config.actor.ppo_epochs > 1)  # old log-probs
    passes += forward * (parts.reference is not None)
    if parts.replay is None:
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


def _add_update(parts: RLParts, mini_batches: Sequence[MiniBatch], results: Sequence[StepResult]) -> None:
    sums, groups = parts.metrics, parts.groups
    if groups.tp.rank() == 0 and groups.cp.rank() == 0 and groups.is_first_stage:
        for mini_batch in mini_batches:
            padding = mini_batch.padded_tokens - mini_batch.real_tokens
            sums.add("batch/padding_fraction", padding, count=mini_batch.padded_tokens)
    # Tensor-parallel ranks know the same; context-parallel ranks each know their tokens.
    if groups.tp.rank() != 0 or not groups.is_last_stage:
        return
    losses = [name for name in _LOSSES if name != "actor/kl_loss" or parts.reference is not None]
    if groups.dp.rank() == 0 and groups.cp.rank() == 0:
        for name in losses:  # each is a sum of shares; what it is a mean over are optimizer steps
            sums.add(name, 0.0, count=len(results))
    for result in results:
        for output in result.outputs:
            tokens, shares, gap = output["tokens"], output["sums"], output["gap"]
            for name in _TOKEN_MEANS:
                sums.add(name, shares[name], count=tokens)
            for name in losses:
                sums.add(name, shares[name], count=0)
            sums.add("training/rollout_probs_diff_mean", gap["probs_diff_sum"], count=tokens)
            sums.add("training/rollout_probs_diff_max", gap["probs_diff_max"])
            sums.add("training/rollout_kl_k3", gap["k3_sum"], count=tokens)


def _table_metrics(parts: RLParts, table: SampleTable) -> dict[str, float]:
    limit = parts.config.data.max_prompt_length
    return {
        **_summary("critic/score", table.score),
        **_summary("critic/rewards", table.score),
        **_summary("response_length", table.response_length),
        "response_length/clip_ratio": float(table.cut_off.mean()),
        **_summary("prompt_length", table.prompt_length),
        "prompt_length/clip_ratio": float((table.prompt_length >= limit).mean()),
    }


def _advantage_metrics(table: SampleTable, advantages: Advantages) -> dict[str, float]:
    weights = table.response_tokens
    values = advantages.advantages.squeeze(1).double().numpy()
    counts = {name: float(count) for name, count in advantages.counts.items()}
    groups = max(counts.pop("group/count"), 1.0)
    mean = float((values * weights).sum() / max(weights.sum(), 1))
    return {
        "critic/advantages/mean": mean,
        "critic/advantages/max": float(values.max()),
        "critic/advantages/min": float(values.min()),
        "group/singleton": counts["group/singleton"],
        "group/zero_variance_fraction": counts["group/equal_rewards"] / groups,
    }


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
