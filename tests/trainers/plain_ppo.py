"""PPO as its papers have it, on transformers models: one sequence at a time, loops over tokens, nothing of megarl.

Clipped surrogate arXiv:1707.06347, dual clip arXiv:1912.09729, GAE arXiv:1506.02438, KL penalty arXiv:1909.08593.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import torch
import transformers


@dataclass(kw_only=True)
class Settings:
    """Of a run."""

    temperature: float
    gamma: float
    lam: float
    kl_coef: float
    target_kl: float
    horizon: int
    epochs: int
    mini_batch_prompts: int
    clip_low: float
    clip_high: float
    clip_dual: float
    clip_value: float
    clip_grad: float
    lr: float
    eps: float
    weight_decay: float


@dataclass(kw_only=True)
class Row:
    """One sample and what is computed of it, a number a response token."""

    group: int
    prompt: list[int]
    response: list[int]
    score: float
    old: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)


class PlainPPO:
    """Actor, critic and reference, and the optimizers."""

    def __init__(self, actor: Path, critic: Path, settings: Settings) -> None:
        language_model = transformers.AutoModelForCausalLM
        self.actor = _load(language_model, actor)
        self.reference = _load(language_model, actor)
        self.critic = _load(transformers.AutoModelForTokenClassification, critic)
        self.optimizers = {model: _adamw(model, settings) for model in (self.actor, self.critic)}
        self.settings = settings
        self.beta = settings.kl_coef

    def step(self, rows: Sequence[Row]) -> dict[str, float]:
        """Trains on a step's samples; gives its metrics."""
        self._before_the_update(rows)
        kl = fmean(fmean(row.kl) for row in rows)
        metrics = {"critic/kl": kl, "critic/kl_coeff": self.beta, **_summary(rows)}
        error = min(max(kl / self.settings.target_kl - 1, -0.2), 0.2)
        self.beta *= 1 + error * len(rows) / self.settings.horizon
        return metrics | self._update_critic(rows) | self._update_actor(rows)

    def _before_the_update(self, rows: Sequence[Row]) -> None:
        with torch.no_grad():
            for row in rows:
                row.old = self._logprobs(self.actor, row).tolist()
                row.values = self._values(row).tolist()
                row.kl = [p - q for p, q in zip(row.old, self._logprobs(self.reference, row).tolist(), strict=True)]
        for row in rows:
            rewards = [-self.beta * kl for kl in row.kl]
            rewards[-1] += row.score
            row.advantages, row.returns = _gae(rewards, row.values, self.settings.gamma, self.settings.lam)
        everyones = _tokens(rows, "advantages")
        mean, deviation = fmean(everyones), math.sqrt(variance(everyones) + 1e-8)
        for row in rows:
            row.advantages = [(advantage - mean) / deviation for advantage in row.advantages]

    def _update_actor(self, rows: Sequence[Row]) -> dict[str, float]:
        losses, norms, kls, clipped, stopped = [], [], [], 0, 0
        for batch in self._mini_batches(rows):
            count = sum(len(row.response) for row in batch)
            total = torch.zeros(())
            for row in batch:
                for now, old, advantage in zip(self._logprobs(self.actor, row), row.old, row.advantages, strict=True):
                    ratio = (now - old).exp()
                    bounded = ratio.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
                    loss = torch.maximum(-advantage * ratio, -advantage * bounded)
                    clipped += int(-advantage * bounded > -advantage * ratio)
                    if advantage < 0 and loss > -advantage * self.settings.clip_dual:
                        loss = torch.tensor(-advantage * self.settings.clip_dual)
                        stopped += 1
                    total = total + loss / count
                    kls.append(old - now.item())
            losses.append(total.item())
            norms.append(self._descend(self.actor, total))
        return {
            "actor/pg_loss": fmean(losses),
            "actor/grad_norm": fmean(norms),
            "actor/ppo_kl": fmean(kls),
            "actor/pg_clipfrac": clipped / len(kls),
            "actor/pg_clipfrac_lower": stopped / len(kls),
        }

    def _update_critic(self, rows: Sequence[Row]) -> dict[str, float]:
        losses, norms, clipped = [], [], 0
        for batch in self._mini_batches(rows):
            count = sum(len(row.response) for row in batch)
            total = torch.zeros(())
            for row in batch:
                for now, old, target in zip(self._values(row), row.values, row.returns, strict=True):
                    bounded = now.clamp(old - self.settings.clip_value, old + self.settings.clip_value)
                    loss = torch.maximum((now - target) ** 2, (bounded - target) ** 2) / 2
                    clipped += int((bounded - target) ** 2 > (now - target) ** 2)
                    total = total + loss / count
                    losses.append(loss.item())
            norms.append(self._descend(self.critic, total))
        return {
            "critic/vf_loss": fmean(losses),
            "critic/grad_norm": fmean(norms),
            "critic/vf_clipfrac": clipped / len(losses),
        }

    def _mini_batches(self, rows: Sequence[Row]) -> Iterable[list[Row]]:
        size, groups = self.settings.mini_batch_prompts, max(row.group for row in rows) + 1
        for _ in range(self.settings.epochs):
            for start in range(0, groups, size):
                yield [row for row in rows if start <= row.group < start + size]

    def _descend(self, model: torch.nn.Module, loss: torch.Tensor) -> float:
        """One optimizer step; gives the gradient's norm before clipping."""
        self.optimizers[model].zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.settings.clip_grad)
        self.optimizers[model].step()
        return norm.item()

    def _logprobs(self, model: torch.nn.Module, row: Row) -> torch.Tensor:
        logits = model(torch.tensor([row.prompt + row.response])).logits[0, len(row.prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / self.settings.temperature, dim=-1)
        return torch.stack([logprobs[place, token] for place, token in enumerate(row.response)])

    def _values(self, row: Row) -> torch.Tensor:
        """Of the state before each response token."""
        return self.critic(torch.tensor([row.prompt + row.response])).logits[0, len(row.prompt) - 1 : -1, 0]


def _gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """(advantages, returns) from Σ (γλ)^k δ_{t+k}, written out for each token."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    advantages = [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas))) for t in range(len(deltas))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def _summary(rows: Sequence[Row]) -> dict[str, float]:
    advantages, returns, values = (_tokens(rows, name) for name in ("advantages", "returns", "values"))
    errors = [target - value for target, value in zip(returns, values, strict=True)]
    return {
        "critic/advantages/mean": fmean(advantages),
        "critic/advantages/max": max(advantages),
        "critic/advantages/min": min(advantages),
        "critic/returns/mean": fmean(returns),
        "critic/values/mean": fmean(values),
        "critic/vf_explained_var": 1 - (stdev(errors) / stdev(returns)) ** 2,
    }


def _tokens(rows: Sequence[Row], name: str) -> list[float]:
    return [number for row in rows for number in getattr(row, name)]


def _load(auto_class: Any, folder: Path) -> torch.nn.Module:
    return auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _adamw(model: torch.nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Weight decay is for matrices: not for norms and biases."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        eps=settings.eps,
    )
