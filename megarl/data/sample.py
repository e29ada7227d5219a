"""What travels through a step: prompts out of the dataset, samples out of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One row of the dataset, ready to generate from."""

    row: int
    """Number of the row over all files of the dataset, before filtering."""
    token_ids: list[int]
    """With the chat template and exactly one BOS (where the model has one)."""
    messages: list[dict[str, Any]]
    """As the dataset has them, for dumps."""
    data_source: str
    """Chooses the grader."""
    reward_model: dict[str, Any] = field(default_factory=dict)
    """verl's column: `style` and `ground_truth`."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Anything else that a reward function wants."""


@dataclass(kw_only=True, slots=True)
class Sample:
    """One response to a prompt, and what became of it."""

    prompt: Prompt
    group: int
    """Which prompt of the step this answers, from 0 over the global batch; samples of one prompt are a group."""
    index: int
    """Which of the group's samples this is, from 0."""
    response_ids: list[int]
    """With the end token, if the model gave one."""
    response_mask: list[int]
    """0 on tokens that the model did not choose (tools, observations)."""
    rollout_logprobs: list[float]
    """The engine's log-prob of each response token, of the distribution that was sampled from."""
    finish_reason: str
    """`stop` (end token), `length` (cut off at the limit) or `abort`."""
    weight_version: int
    """Of the weights that generated it: the number of optimizer steps they have seen."""
    response_text: str = ""
    """The decoded response, without special tokens: what graders read."""
    rewards: dict[str, float] = field(default_factory=dict)
    """By name; `score` is the one that is trained on."""
    reward_failure: str | None = None
    """Why scoring failed, where it did; the score is then `reward.failure_score`."""
