"""What travels through a step: prompts out of the dataset, samples out of the engine."""

from __future__ import annotations

import base64
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy

ROUTED_EXPERTS = numpy.dtype("<i2")
"""Of `Sample.routed_experts`, also on disk."""


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
    """Of the weights that generated it: the number of optimizer steps they have seen. Where several versions did, of
    those that drew its last token."""
    response_text: str = ""
    """The decoded response, without special tokens: what graders read."""
    rewards: dict[str, float] = field(default_factory=dict)
    """By name; `score` is the one that is trained on."""
    reward_failure: str | None = None
    """Why scoring failed, where it did; the score is then `reward.failure_score`."""
    routed_experts: numpy.ndarray | None = field(default=None, compare=False)  # arrays have no plain equality
    """int16 [prompt + response, mixtures, top-k]: experts that the engine chose for each token, -1 where it did not
    compute one, as the last; None where it was not asked (`actor.router_replay.mode` R3)."""
    weight_versions: list[list[int]] = field(default_factory=list)
    """[first token, version] of each span, where weights changed in its middle; else empty."""


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A sample as JSON holds it; `sample_from_json` takes it back."""
    fields = dataclasses.asdict(dataclasses.replace(sample, routed_experts=None))
    experts = sample.routed_experts
    if experts is not None:
        data = base64.b64encode(experts.astype(ROUTED_EXPERTS).tobytes()).decode("ascii")
        fields["routed_experts"] = {"shape": list(experts.shape), "int16": data}
    return fields


def sample_from_json(fields: dict[str, Any]) -> Sample:
    """The sample of `sample_to_json`.

    Raises:
        KeyError, TypeError, ValueError: these are not the fields of a sample.
    """
    experts = fields.get("routed_experts")
    if experts is not None:
        data = base64.b64decode(experts["int16"], validate=True)
        experts = numpy.frombuffer(data, dtype=ROUTED_EXPERTS).reshape(experts["shape"])
    return Sample(**{**fields, "prompt": Prompt(**fields["prompt"]), "routed_experts": experts})
