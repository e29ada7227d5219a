"""Advantages and the clipped loss: time beside verl's functions and beside plain loops.

    python benchmarks/algorithms.py [--sizes 512x2048 1024x8192] [--rounds 3] [--tool-spans] [--json]

One process; the variants of a case alternate, and the median round of each counts, after one that does not count.
Responses are half to wholly as long as the longest; with --tool-spans a tenth of their tokens are masked in spans of
sixteen. verl takes part where it is installed. `plain` is the textbook loop over time, or the formula written down.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOptions, advantage_estimator
from megarl.algorithms.aggregate import Denominators, aggregate, row_weights, token_weights
from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, policy_loss

GAMMA, LAM = 0.99, 0.95
SAMPLES_PER_PROMPT = 8
LOW, HIGH = 0.2, 0.28

Variant = Callable[[], Any]


@dataclass(frozen=True)
class Batch:
    mask: Tensor
    """int64 [rows, time]; so have the others this shape"""
    rewards: Tensor
    values: Tensor
    old: Tensor
    logprobs: Tensor
    advantages: Tensor

    @property
    def groups(self) -> Tensor:
        return torch.arange(len(self.mask)) // SAMPLES_PER_PROMPT

    @classmethod
    def random(cls, rows: int, length: int, tool_spans: bool) -> Batch:
        generator = torch.Generator().manual_seed(0)
        normal = lambda: torch.randn(rows, length, generator=generator)
        mask = torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
        if tool_spans:
            spans = torch.rand(rows, length // 16, generator=generator) < 0.1
            mask &= ~spans.repeat_interleave(16, dim=1)
            mask[:, 0] = True
        rewards = torch.zeros(rows, length)
        last = length - 1 - mask.flip(1).byte().argmax(dim=1)
        rewards[torch.arange(rows), last] = torch.randint(0, 2, (rows,), generator=generator).float()
        old = -normal().abs()
        logprobs = (old + 0.1 * normal()).requires_grad_()
        return cls(mask.long(), rewards, normal(), old, logprobs, normal()[:, :1].expand(rows, length).contiguous())


def megarl(batch: Batch) -> dict[str, Variant]:
    inputs = AdvantageInputs(rewards=batch.rewards, mask=batch.mask, groups=batch.groups, values=batch.values)
    options = AdvantageOptions(gamma=GAMMA, lam=LAM)
    loss_options = PolicyLossOptions(clip_ratio_low=LOW, clip_ratio_high=HIGH)

    def clipped_loss() -> None:
        lengths = batch.mask.sum(1)
        rows = torch.arange(len(lengths)).unsqueeze(1).expand(batch.mask.shape)
        weights = token_weights(row_weights("token-mean", lengths, Denominators.of(lengths)), rows, batch.mask)
        loss = policy_loss.get("ppo")(
            PolicyLossInputs(
                logprobs=batch.logprobs, old_logprobs=batch.old, advantages=batch.advantages, mask=batch.mask
            ),
            loss_options,
        )
        torch.autograd.grad(aggregate(loss.loss, weights), batch.logprobs)

    estimators = {name: advantage_estimator.get(name) for name in ("gae", "reinforce_plus_plus", "grpo")}
    return {
        **{name: (lambda estimate=estimate: estimate(inputs, options)) for name, estimate in estimators.items()},
        "clipped loss": clipped_loss,
    }


def plain(batch: Batch) -> dict[str, Variant]:
    mask = batch.mask.float()

    def whiten(values: Tensor) -> Tensor:
        mean = (values * mask).sum() / mask.sum()
        variance = ((values - mean).square() * mask).sum() / (mask.sum() - 1)
        return (values - mean) * (variance + 1e-8).rsqrt() * mask

    def gae() -> Tensor:
        advantage, following = torch.zeros(len(mask)), torch.zeros(len(mask))
        advantages = torch.zeros_like(mask)
        for t in reversed(range(mask.shape[1])):
            valid = batch.mask[:, t].bool()
            delta = batch.rewards[:, t] + GAMMA * following - batch.values[:, t]
            advantage = torch.where(valid, delta + GAMMA * LAM * advantage, advantage)
            following = torch.where(valid, batch.values[:, t], following)
            advantages[:, t] = advantage
        return whiten(advantages)

    def reinforce_plus_plus() -> Tensor:
        total, returns = torch.zeros(len(mask)), torch.zeros_like(mask)
        for t in reversed(range(mask.shape[1])):
            total = torch.where(batch.mask[:, t].bool(), batch.rewards[:, t] + GAMMA * total, total)
            returns[:, t] = total
        return whiten(returns)

    def grpo() -> Tensor:
        scores = batch.rewards.sum(1).view(-1, SAMPLES_PER_PROMPT)
        normalised = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
        return normalised.view(-1, 1) * mask

    def clipped_loss() -> None:
        ratio = (batch.logprobs - batch.old).clamp(-20, 20).exp()
        surrogate = torch.maximum(-batch.advantages * ratio, -batch.advantages * ratio.clamp(1 - LOW, 1 + HIGH))
        dual = torch.where(batch.advantages < 0, torch.minimum(surrogate, -3.0 * batch.advantages), surrogate)
        torch.autograd.grad((dual * mask).sum() / mask.sum(), batch.logprobs)

    return {"gae": gae, "reinforce_plus_plus": reinforce_plus_plus, "grpo": grpo, "clipped loss": clipped_loss}


def verl(batch: Batch) -> dict[str, Variant]:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    index = batch.groups.numpy()
    algorithm = AlgoConfig(gamma=GAMMA)
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=SAMPLES_PER_PROMPT,
        use_dynamic_bsz=True,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
    )

    def clipped_loss() -> None:
        loss, _ = core_algos.compute_policy_loss_vanilla(
            batch.old, batch.logprobs, batch.advantages, batch.mask, "token-mean", actor
        )
        torch.autograd.grad(loss, batch.logprobs)

    return {
        "gae": lambda: core_algos.compute_gae_advantage_return(batch.rewards, batch.values, batch.mask, GAMMA, LAM),
        "reinforce_plus_plus": lambda: core_algos.compute_reinforce_plus_plus_outcome_advantage(
            batch.rewards, batch.mask, algorithm
        ),
        "grpo": lambda: core_algos.compute_grpo_outcome_advantage(batch.rewards, batch.mask, index),
        "clipped loss": clipped_loss,
    }


def measure(rows: int, length: int, rounds: int, tool_spans: bool) -> list[dict[str, Any]]:
    """One record for each case: median seconds of each variant, and how many times megarl's the others take."""
    batch = Batch.random(rows, length, tool_spans)
    variants = {"megarl": megarl(batch), "plain": plain(batch)}
    if importlib.util.find_spec("verl") is not None:
        variants["verl"] = verl(batch)
    records = []
    for case in variants["megarl"]:
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds + 1):
            for name, cases in variants.items():
                start = time.perf_counter()
                cases[case]()
                seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        records.append(
            {
                "case": case,
                "rows": rows,
                "time": length,
                "seconds": medians,
                "times_megarl": {
                    name: value / medians["megarl"] for name, value in medians.items() if name != "megarl"
                },
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["512x2048", "1024x8192"], metavar="ROWSxTIME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tool-spans", action="store_true", help="mask spans within responses, as tools do")
    parser.add_argument("--json", action="store_true", help="one JSON record a line instead of the table")
    options = parser.parse_args()
    for size in options.sizes:
        rows, length = (int(number) for number in size.split("x"))
        for record in measure(rows, length, options.rounds, options.tool_spans):
            print(json.dumps(record) if options.json else _row(record), flush=True)


def _row(record: dict[str, Any]) -> str:
    milliseconds = "  ".join(f"{name} {1e3 * value:8.1f} ms" for name, value in record["seconds"].items())
    ratios = "  ".join(f"{name} {value:5.1f}×" for name, value in record["times_megarl"].items())
    return f"{record['rows']:>5,} × {record['time']:<6,} {record['case']:20} {milliseconds}   {ratios}"


if __name__ == "__main__":
    main()
