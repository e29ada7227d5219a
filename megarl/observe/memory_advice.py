"""What to change in a config when memory runs out, by the phase in which it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megarl.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One key that takes less memory with another value."""

    key: str
    to: Any = None
    """The value; None where a number has to go up or down."""
    direction: str = ""
    """`lower` or `raise`."""
    why: str

    def describe(self, config: RunConfig) -> str:
        """E.g. `lower actor.max_tokens_per_micro_batch (now 16384)`."""
        if self.to is None:
            return f"{self.direction} {self.key} (now {_shown(self.value(config))})"
        return f"set {self.key} to {_shown(self.to)}"

    def value(self, config: RunConfig) -> Any:
        return attrgetter(self.key)(config)

    def is_possible(self, config: RunConfig) -> bool:
        """Whether the config does not have it yet."""
        value = self.value(config)
        return value != self.to if self.to is not None else self.direction != "lower" or value is None or value > 1


_ACTOR_TOKENS = Change(
    key="actor.max_tokens_per_micro_batch", direction="lower", why="activations and logits grow with it"
)
_CRITIC_TOKENS = Change(
    key="critic.max_tokens_per_micro_batch", direction="lower", why="the critic's activations grow with it"
)
_RECOMPUTE = Change(key="model.recompute_granularity", to="full", why="activations are computed again in the backward")
_TENSOR = Change(
    key="parallel.tensor_model_parallel_size", direction="raise", why="weights, optimizer and activations are shared"
)
_PIPELINE = Change(
    key="parallel.pipeline_model_parallel_size", direction="raise", why="each rank holds fewer of the layers"
)
_CONTEXT = Change(key="parallel.context_parallel_size", direction="raise", why="each rank holds a part of a sequence")
_SHARDED_OPTIMIZER = Change(
    key="parallel.use_distributed_optimizer", to=True, why="data-parallel ranks share the optimizer's state"
)
_SEQUENCES = Change(key="rollout.max_num_seqs", direction="lower", why="the KV cache grows with it")
_RESPONSES = Change(key="data.max_response_length", direction="lower", why="the KV cache grows with it")
_BUCKET = Change(key="rollout.update_weights_bucket_megabytes", direction="lower", why="a bucket is held twice")

_UPDATE = (_ACTOR_TOKENS, _RECOMPUTE, _TENSOR, _PIPELINE, _CONTEXT, _SHARDED_OPTIMIZER)
_FORWARD = (_ACTOR_TOKENS, _TENSOR, _PIPELINE, _CONTEXT)
_WEIGHTS = (_TENSOR, _PIPELINE, _SHARDED_OPTIMIZER)
_BY_PHASE: dict[str, Sequence[Change]] = {
    "gen": (_SEQUENCES, _RESPONSES, _TENSOR, _PIPELINE),
    "old_log_prob": _FORWARD,
    "ref": _FORWARD,
    "values": (_CRITIC_TOKENS, *_FORWARD[1:]),
    "update_critic": (_CRITIC_TOKENS, *_UPDATE[1:]),
    "update_actor": _UPDATE,
    "sync": (_BUCKET, _TENSOR, _PIPELINE),
    "step": _UPDATE,
    "testing": (_SEQUENCES, _ACTOR_TOKENS, _RESPONSES, _TENSOR, _PIPELINE),
}


def changes_for(config: RunConfig, phases: Sequence[str]) -> list[Change]:
    """What helps most comes first.

    Args:
        phases: that were running, the outermost first; empty before the first step, when models are loaded.
    """
    known = [phase for phase in reversed(phases) if phase in _BY_PHASE]
    changes = _BY_PHASE[known[0]] if known else _WEIGHTS
    if config.trainer.kind != "rl":  # nothing is generated
        changes = [change for change in changes if not change.key.startswith(("rollout.", "data."))]
    return [change for change in changes if change.is_possible(config)]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
