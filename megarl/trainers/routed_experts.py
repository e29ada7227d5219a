"""The experts that engines report, on their way into the trainer (`actor.router_replay.mode` R3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from megarl.config import ConfigError, ModelShape, RunConfig
from megarl.data.sample import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedShape:
    """What an engine reports of a token."""

    mixtures: int
    """Layers with experts."""
    topk: int
    """Experts that a token goes to in one of them."""
    experts: int
    """Of one layer."""

    @classmethod
    def of(cls, config: RunConfig, model: ModelShape) -> RoutedShape | None:
        """None where engines are not asked."""
        if config.actor.router_replay.mode != "R3":
            return None
        return cls(
            mixtures=model.num_layers - model.num_dense_layers,
            topk=model.experts_per_token,
            experts=model.num_experts,
        )

    @property
    def numbers(self) -> int:
        """Of a token."""
        return self.mixtures * self.topk

    def check(self, samples: Sequence[Sample], source: str) -> None:
        """Whether samples have what is to be replayed: wrong experts would be silent.

        Args:
            source: what they come from, for errors.

        Raises:
            ConfigError: experts are missing, or cannot be those of this model.
        """
        for sample in samples:
            problem = self._problem(sample)
            if problem is not None:
                raise ConfigError(
                    f"actor.router_replay.mode is R3, but {source} gives sample {sample.index} of prompt "
                    f"{sample.group} {problem}: set it to R2 or disabled, or take rollouts of this model with R3."
                )

    def _problem(self, sample: Sample) -> str | None:
        experts = sample.routed_experts
        if experts is None:
            return "without the experts that an engine chose"
        wanted = (len(sample.prompt.token_ids) + len(sample.response_ids), self.mixtures, self.topk)
        if experts.shape != wanted:
            return f"with experts of shape {list(experts.shape)} in the place of {list(wanted)}"
        if experts.min() < -1 or experts.max() >= self.experts:
            worst = experts.min() if experts.min() < -1 else experts.max()
            return f"with expert {worst}, where the model has 0 … {self.experts - 1}"
        ordered = numpy.sort(experts, axis=-1)
        is_free = (experts == -1).all(axis=-1, keepdims=True)
        if ((ordered[..., :-1] == ordered[..., 1:]) & ~is_free).any() or ((experts == -1) & ~is_free).any():
            return f"with a token that does not go to {self.topk} different experts"
        return None
