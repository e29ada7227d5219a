"""Changed copies of a config: what a plan may suggest, each as the overrides that a person would type."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.config.batches import BatchPlan
from megarl.config.schema import RunConfig
from megarl.planning.architecture import Architecture

TP_KEY = "parallel.tensor_model_parallel_size"
PP_KEY = "parallel.pipeline_model_parallel_size"
VPP_KEY = "parallel.virtual_pipeline_model_parallel_size"
CP_KEY = "parallel.context_parallel_size"
EP_KEY = "parallel.expert_model_parallel_size"
ETP_KEY = "parallel.expert_tensor_parallel_size"
SP_KEY = "parallel.sequence_parallel"
FIRST_STAGE_KEY = "parallel.num_layers_in_first_pipeline_stage"
LAST_STAGE_KEY = "parallel.num_layers_in_last_pipeline_stage"
ENGINE_KEY = "rollout.tensor_model_parallel_size"
RECOMPUTE_KEY = "model.recompute_granularity"
MICRO_BATCH_KEY = "actor.max_tokens_per_micro_batch"
DISTRIBUTED_OPTIMIZER_KEY = "parallel.use_distributed_optimizer"

Overrides = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A config, and what makes it differ from the one it was made of."""

    config: RunConfig
    world_size: int
    overrides: Overrides

    def describe(self) -> str:
        """As on a command line."""
        return " ".join(f"{key}={_text(value)}" for key, value in self.overrides.items())


def changed(config: RunConfig, world_size: int, overrides: Overrides) -> Candidate:
    """A config with other values, which shares the sections that stay; values that are as they were are not listed."""
    different = {}
    sections: dict[str, Any] = {}
    for key, value in overrides.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name) != value:
            sections.setdefault(section, copy.copy(getattr(config, section)))
            setattr(sections[section], name, value)
            different[key] = value
    return Candidate(config=replace(config, **sections), world_size=world_size, overrides=different)


def works(candidate: Candidate, architectures: Sequence[Architecture]) -> bool:
    """Whether layout, batches and engine of a candidate are possible; nothing about memory.

    Args:
        architectures: of the models in the layout, the one that generates first.
    """
    config, shape = candidate.config, architectures[0].shape
    layout = config.parallel.layout(candidate.world_size)
    engine = config.rollout.tensor_model_parallel_size
    return (
        not any(layout.problems(architecture.shape) for architecture in architectures)
        and not any(BatchPlan.of(config, layout).problems())
        and (bool(config.rollout.servers) or candidate.world_size % engine == 0)
        and shape.num_heads % engine == 0
    )


def stage_overrides(num_layers: int, pp: int) -> Overrides | None:
    """How `pp` stages share the layers: equally, or with fewer on the first and last; None where neither works."""
    even = {PP_KEY: pp, FIRST_STAGE_KEY: None, LAST_STAGE_KEY: None}
    if num_layers % pp == 0:
        return even
    share = -(-num_layers // pp)
    ends = num_layers - share * (pp - 2)
    if pp < 2 or ends < 2:
        return None
    # The last stage has the logits, so it gets the smaller half.
    return {**even, FIRST_STAGE_KEY: -(-ends // 2), LAST_STAGE_KEY: ends // 2}


def tensor_overrides(tp: int) -> Overrides:
    """Tensor parallelism of `tp` ranks; with one there is nothing that sequence parallelism could share."""
    return {TP_KEY: tp, SP_KEY: None} if tp == 1 else {TP_KEY: tp}


def single_changes(config: RunConfig, world_size: int, architectures: Sequence[Architecture]) -> Iterator[Candidate]:
    """Copies that differ in one way that may take less memory."""
    layout, shape = config.parallel.layout(world_size), architectures[0].shape
    engine = config.rollout.tensor_model_parallel_size
    longest = config.data.max_prompt_length + config.data.max_response_length
    choices: list[Overrides | None] = [
        {RECOMPUTE_KEY: "full"},
        {DISTRIBUTED_OPTIMIZER_KEY: True},
        {MICRO_BATCH_KEY: max(longest, config.actor.max_tokens_per_micro_batch // 2)},
        {TP_KEY: 2 * layout.tp},
        stage_overrides(shape.num_layers, 2 * layout.pp),
        {CP_KEY: 2 * layout.cp},
        {ENGINE_KEY: 2 * engine},
        {ENGINE_KEY: 4 * engine},
        {"rollout.max_num_seqs": max(config.rollout.max_num_seqs // 2, 1)},
    ]
    if shape.is_moe:
        choices += [{EP_KEY: 2 * layout.ep}, {ETP_KEY: 1, EP_KEY: layout.ep * layout.etp}]
    if layout.vpp > 1:
        choices.append({VPP_KEY: 1})
    for overrides in choices:
        candidate = overrides and changed(config, world_size, overrides)
        if candidate and candidate.overrides and works(candidate, architectures):
            yield candidate


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
