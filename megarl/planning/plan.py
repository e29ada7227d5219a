"""One run's plan: what is wrong with it, and sections of answers for people and for scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megarl.config import ConfigError, RunConfig, validate
from megarl.config.engines import engine_expert_shares
from megarl.config.layout import Layout
from megarl.planning.candidates import ENGINE_KEY, single_changes
from megarl.planning.hardware import GPU
from megarl.planning.memory import ELEMENT_BYTES, GIB, MemoryPlan, ModelUse, models_of, plan_memory
from megarl.planning.parameters import model_parameters
from megarl.planning.search import search
from megarl.planning.sections import (
    Section,
    batch_section,
    memory_section,
    model_section,
    search_section,
    time_section,
)
from megarl.planning.step_time import Lengths, estimate_step, micro_batch_count
from megarl.planning.sync_plan import bucket_bytes, plan_sync
from megarl.planning.weight_map_run import map_weights
from megarl.planning.weight_sections import map_problems, map_section, sync_section

_NOT_HERE = " does not exist (looked for from "
"""How validation says that a file is missing. A plan is made on a laptop, where the data of a run rarely is."""

_SUGGESTIONS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is asked."""

    config: RunConfig
    world_size: int
    gpu: GPU
    limit: float
    """Bytes of one GPU."""
    lengths: Lengths
    searches: bool = False
    maps_weights: bool = False
    """Whether to build every rank's modules and prove the weight map, which takes up to minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer."""

    problems: list[str] = field(default_factory=list)
    """Why the run cannot work, one sentence each; empty if it can."""
    notes: list[str] = field(default_factory=list)
    """What does not count against it: files that are not on this machine."""
    sections: list[Section] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        answers = {section.name: section.data for section in self.sections}
        return {"works": not self.problems, "problems": self.problems, "notes": self.notes, **answers}


def make_plan(request: Request) -> Plan:
    """Validates and plans. Where something is impossible there are problems and, but for a search, no sections."""
    config, world_size = request.config, request.world_size
    notes = [problem for problem in validate(config, world_size) if _NOT_HERE in problem]
    problems = _problems(config, world_size)
    try:
        models = models_of(config)
    except ConfigError as error:
        # Validation has named the folder; only what stands in it may be new.
        return Plan(problems=problems or error.problems, notes=notes)
    layout = config.parallel.layout(world_size)
    of_layout = [problem for model in models for problem in layout.problems(model.architecture.shape)]
    # What a search varies may be wrong in the config; with anything else wrong there is nothing to search.
    varied = [*of_layout, f"{ENGINE_KEY} is "]
    if any(not any(part in problem for part in varied) for problem in problems):
        return Plan(problems=problems, notes=notes)
    sections = [model_section(models)]
    if not problems:
        problems, answers = _plan_layout(request, layout, models)
        sections += answers
        if request.maps_weights:
            more, proof = _map_weights(config, layout, models)
            problems += more
            sections += proof
    if request.searches:
        results = search(config, world_size, request.gpu, request.limit, request.lengths, models)
        sections.append(search_section(results))
    return Plan(problems=problems, notes=notes, sections=sections)


def _plan_layout(request: Request, layout: Layout, models: list[ModelUse]) -> tuple[list[str], list[Section]]:
    """The problems and sections of a layout that is possible."""
    config, lengths = request.config, request.lengths
    count = micro_batch_count(config, layout, lengths, models[0].max_tokens)
    memory = plan_memory(config, request.world_size, request.limit, micro_batches=count, models=models)
    parameters = model_parameters(models[0].architecture)
    sections = [batch_section(config, layout, lengths, count), memory_section(memory)]
    if memory.kv is not None:
        sync = plan_sync(
            models[0].architecture,
            layout,
            request.gpu,
            element_bytes=ELEMENT_BYTES[config.model.dtype],
            engine_size=config.rollout.tensor_model_parallel_size,
            engine_shares=engine_expert_shares(config.rollout),
            bucket_bytes=bucket_bytes(config.rollout),
        )
        sections.append(sync_section(sync, parameters, request.gpu))
    if memory.missing:
        return [_memory_problem(memory), *_help(request, memory, models)], sections
    time = estimate_step(config, layout, request.gpu, lengths, models, memory)
    return [], [*sections, time_section(time, lengths, request.gpu, parameters, models[0].architecture)]


def _map_weights(config: RunConfig, layout: Layout, models: list[ModelUse]) -> tuple[list[str], list[Section]]:
    try:
        maps = map_weights(config, layout, models)
    except RuntimeError as error:
        return [f"{error}; --no-map plans without it."], []
    return map_problems(maps), [map_section(maps, layout.world_size)]


def _memory_problem(memory: MemoryPlan) -> str:
    worst = memory.worst
    largest = max(worst.phases[worst.worst_phase].items(), key=lambda item: item[1])
    return (
        f"Ranks {worst.ranks[0]}-{worst.ranks[-1]} (pipeline stage {worst.stage}) need {worst.peak / GIB:.1f} GiB in "
        f"{worst.worst_phase}, most of it {largest[0]} with {largest[1] / GIB:.1f} GiB, but a GPU has "
        f"{memory.limit / GIB:.0f} GiB: {_missing(memory.missing)} GiB are missing."
    )


def _help(request: Request, memory: MemoryPlan, models: list[ModelUse]) -> Iterator[str]:
    """What would help, tried out: the changes that save most, in one sentence."""
    tried = []
    for candidate in single_changes(request.config, request.world_size, [model.architecture for model in models]):
        if _problems(candidate.config, request.world_size):
            continue
        changed = models_of(candidate.config)
        layout = candidate.config.parallel.layout(request.world_size)
        count = micro_batch_count(candidate.config, layout, request.lengths, changed[0].max_tokens)
        missing = plan_memory(
            candidate.config, request.world_size, request.limit, micro_batches=count, models=changed
        ).missing
        if missing < memory.missing:
            tried.append((missing, candidate.describe()))
    tried.sort()
    outcome = lambda missing: f"still {_missing(missing)} GiB short" if missing else "fits"
    if tried:
        listed = "; ".join(f"{text} ({outcome(missing)})" for missing, text in tried[:_SUGGESTIONS])
        yield f"What would help: {listed}; or more GPUs, or --search for all sizes at once."
    else:
        yield "No single change makes it smaller: take more or larger GPUs, or try --search."


def _missing(size: float) -> str:
    """GiB, rounded up: 0.0 would not be missing."""
    return f"{math.ceil(10 * size / GIB) / 10:.1f}"


def _problems(config: RunConfig, world_size: int) -> list[str]:
    """What validation finds, missing files aside."""
    return [problem for problem in validate(config, world_size) if _NOT_HERE not in problem]
