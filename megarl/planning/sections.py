"""The parts of a plan as lines for people and as data for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config.batches import BatchPlan
from megarl.config.layout import Layout
from megarl.config.schema import RunConfig
from megarl.planning.architecture import Architecture
from megarl.planning.hardware import DENSE_EFFICIENCY, GPU, MOE_EFFICIENCY
from megarl.planning.memory import GIB, MemoryPlan, ModelUse, StageMemory, describe_peak
from megarl.planning.parameters import layers_token_weights, model_parameters
from megarl.planning.published import similar_runs
from megarl.planning.schedule import bubble
from megarl.planning.search import Found
from megarl.planning.step_time import UNCERTAINTY, Lengths, StepTime

_LAYOUTS_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of a plan."""

    name: str
    """Its key in the JSON output."""
    title: str
    lines: Sequence[str]
    data: dict[str, Any]


def model_section(models: list[ModelUse]) -> Section:
    """The models of the run and their sizes."""
    lines, data = [], {}
    for model in models:
        total, active = model_parameters(model.architecture), _active(model.architecture)
        sparse = f", {active / 1e9:.1f} billion active for a token" if model.architecture.shape.is_moe else ""
        use = "trained" if model.trains else "only computed"
        lines.append(
            f"{model.name}: {model.architecture.shape.model_type}, {total / 1e9:.2f} billion weights{sparse}; {use}"
        )
        data[model.name] = {"parameters": total, "active_parameters": active, "trains": model.trains}
    return Section(name="models", title="Models", lines=lines, data=data)


def batch_section(config: RunConfig, layout: Layout, lengths: Lengths, micro_batches: int) -> Section:
    """The arithmetic of batches, in words."""
    batch = BatchPlan.of(config, layout)
    waiting = bubble(layout, micro_batches)
    lines = [f"layout: {layout.describe()}", *batch.describe().splitlines()]
    lines.append(
        f"with samples of {lengths.sample:.0f} tokens in the mean: {micro_batches} micro-batches in each optimizer "
        "step of a data-parallel rank"
        + (f"; pipeline stages wait {100 * waiting:.0f} % of the time that they compute" if layout.pp > 1 else "")
    )
    data = {
        "layout": layout.describe(),
        "dp": layout.dp,
        "samples": batch.samples,
        "mini_batches": batch.mini_batches,
        "micro_batches": micro_batches,
        "bubble": waiting,
    }
    return Section(name="batches", title="Layout and batches", lines=lines, data=data)


def memory_section(memory: MemoryPlan) -> Section:
    """Each class of ranks, and the worst one phase by phase."""
    columns = list(memory.worst.phases)
    lines = ["GiB on each rank, by pipeline stage:", _row("ranks", "layers", "weights", *columns, "peak")]
    for stages in _alike(memory.stages):
        first, last = stages[0], stages[-1]
        totals = [f"{first.total(phase) / GIB:.1f}" for phase in columns]
        ranks = f"{first.ranks[0]}-{last.ranks[-1]}"
        lines.append(_row(ranks, first.layers, f"{first.parameters / 1e9:.2f}e9", *totals, f"{first.peak / GIB:.1f}"))
    lines += ["", f"GiB on the worst rank (pipeline stage {memory.worst.stage}):"]
    lines += _phase_table(memory.worst)
    lines += ["", *describe_peak(memory)]
    data = {
        "limit": memory.limit,
        "missing": memory.missing,
        "worst_stage": memory.worst.stage,
        "worst_phase": str(memory.worst.worst_phase),
        "kv_sequences": memory.kv.sequences if memory.kv else None,
        "stages": [
            {
                "stage": stage.stage,
                "ranks": [stage.ranks[0], stage.ranks[-1]],
                "layers": stage.layers,
                "parameters": stage.parameters,
                "peak": stage.peak,
                "phases": {str(phase): {str(k): v for k, v in held.items()} for phase, held in stage.phases.items()},
            }
            for stage in memory.stages
        ],
    }
    return Section(name="memory", title="Memory", lines=lines, data=data)


def time_section(time: StepTime, lengths: Lengths, gpu: GPU, parameters: int, architecture: Architecture) -> Section:
    """The time of a step, what it rests on, and published runs beside it."""
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in time.seconds.items())
    efficiency = MOE_EFFICIENCY if architecture.shape.is_moe else DENSE_EFFICIENCY
    lines = [
        f"step: about {time.total:.0f} s ({parts}); rewards not counted",
        f"{time.tokens_per_s_per_gpu:.1f} tokens/s/GPU over {time.tokens:.3g} tokens; MFU {100 * time.mfu:.1f} % of "
        f"the whole step, {100 * time.update_mfu:.0f} % of updates",
        f"assumed: prompts of {lengths.prompt:.0f} and responses of {lengths.response:.0f} tokens in the mean; "
        f"{100 * efficiency:.0f} % of {gpu.name}'s {time.peak_tflops:.0f} TFLOP/s while passes compute, and no "
        "communication hidden behind them",
        f"certainty: within a factor of {UNCERTAINTY:g} at these lengths; set by published runs of another "
        "trainer, not by a run of megarl on GPUs",
    ]
    published = similar_runs(parameters)
    lines += [f"published: {run.describe()}" for run in published]
    if not published:
        lines.append("published: no figure for RL of a model of this size")
    data = {
        "step_s": time.total,
        "seconds": time.seconds,
        "tokens": time.tokens,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu": time.mfu,
        "update_mfu": time.update_mfu,
        "uncertainty_factor": UNCERTAINTY,
        "published": [run.describe() for run in published],
    }
    return Section(name="time", title="Time of a step", lines=lines, data=data)


def search_section(found: list[Found]) -> Section:
    """The fastest layouts that fit."""
    if not found:
        lines = ["no layout fits: take more or larger GPUs, or fewer tokens in a micro-batch"]
        return Section(name="search", title="Layouts that fit", lines=lines, data={"fitting": 0, "best": []})
    lines = [f"{len(found)} layouts fit; the fastest by estimate:"]
    best = []
    for place, item in enumerate(found[:_LAYOUTS_SHOWN], start=1):
        layout = item.candidate.config.parallel.layout(item.candidate.world_size)
        lines += [
            f"{place}. {item.time.total:.0f} s: {layout.describe()}",
            f"   {item.reasons}",
            f"   {item.candidate.describe() or 'the config as it is'}",
        ]
        best.append(
            {
                "step_s": item.time.total,
                "layout": layout.describe(),
                "peak": item.memory.worst.peak,
                "overrides": item.candidate.overrides,
                "reasons": item.reasons,
            }
        )
    return Section(name="search", title="Layouts that fit", lines=lines, data={"fitting": len(found), "best": best})


def _active(architecture: Architecture) -> int:
    """Weights that a token is multiplied by, head included."""
    return layers_token_weights(architecture) + architecture.shape.hidden_size * architecture.shape.vocab_size


def _alike(stages: list[StageMemory]) -> list[list[StageMemory]]:
    """Neighbouring stages that a table would show with the same numbers."""
    shown = lambda stage: (stage.layers, *(round(stage.total(phase) / GIB, 1) for phase in stage.phases))
    groups: list[list[StageMemory]] = []
    for stage in stages:
        if groups and shown(groups[-1][0]) == shown(stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _phase_table(stage: StageMemory) -> list[str]:
    items = list(dict.fromkeys(item for held in stage.phases.values() for item in held))
    items = [item for item in items if any(held.get(item) for held in stage.phases.values())]
    lines = [_row("phase", *items, "total", width=15)]
    for phase, held in stage.phases.items():
        cells = [f"{held.get(item, 0) / GIB:.1f}" if held.get(item) else "-" for item in items]
        lines.append(_row(phase, *cells, f"{stage.total(phase) / GIB:.1f}", width=15))
    return lines


def _row(first: object, *cells: object, width: int = 11) -> str:
    return f"  {first!s:<11}" + "".join(f"{cell!s:>{width}}" for cell in cells)
