"""Layouts of a run on a number of GPUs: which fit, and which of these is estimated to be fastest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.config.schema import RunConfig
from megarl.planning.architecture import Architecture
from megarl.planning.candidates import (
    CP_KEY,
    ENGINE_KEY,
    EP_KEY,
    ETP_KEY,
    RECOMPUTE_KEY,
    VPP_KEY,
    Candidate,
    Overrides,
    changed,
    stage_overrides,
    tensor_overrides,
    works,
)
from megarl.planning.hardware import GPU, GPUS_A_NODE
from megarl.planning.memory import GIB, TIGHT, MemoryPlan, ModelUse, plan_memory
from megarl.planning.step_time import Lengths, StepTime, estimate_step, micro_batch_count

_LARGEST_PP = 32
_LARGEST_CP = 8
_LARGEST_ENGINE = 64
_RECOMPUTE = ("none", "selective", "full")
"""From the fastest to the one that takes least memory."""
_RECOMPUTE_WORDS = {
    "none": "nothing is computed twice",
    "selective": "core attention is computed twice",
    "full": "every forward pass is computed twice",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One layout that fits."""

    candidate: Candidate
    memory: MemoryPlan
    time: StepTime

    @property
    def reasons(self) -> str:
        """What makes it fast or slow, in words."""
        config, kv = self.candidate.config, self.memory.kv
        layout = config.parallel.layout(self.candidate.world_size)
        parts = [f"{self.memory.worst.peak / GIB:.0f} GiB in {self.memory.worst.worst_phase}"]
        recompute = config.model.recompute_granularity
        parts.append(_RECOMPUTE_WORDS[recompute])
        if layout.pp > 1:
            parts.append(f"pipeline waits {100 * self.time.bubble:.0f} %")
        if layout.tp > GPUS_A_NODE:
            parts.append("TP leaves the node")
        if kv is not None:
            parts.append(f"engine TP{config.rollout.tensor_model_parallel_size} with room for {kv.sequences} sequences")
        return ", ".join(parts)


def search(
    config: RunConfig, world_size: int, gpu: GPU, limit: float, lengths: Lengths, models: list[ModelUse]
) -> list[Found]:
    """Every layout tried that fits, the fastest first. Batch sizes and micro-batch tokens stay as they are.

    Args:
        limit: bytes of one GPU.
        models: of the config; those beside the actor stand in the actor's layout.
    """
    found = []
    for overrides in _layouts(config, world_size, [model.architecture for model in models]):
        best = _best_of_layout(config, world_size, gpu, limit, lengths, models, overrides)
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda item: item.time.total)


def _best_of_layout(
    config: RunConfig,
    world_size: int,
    gpu: GPU,
    limit: float,
    lengths: Lengths,
    models: list[ModelUse],
    overrides: Overrides,
) -> Found | None:
    """The layout with as little recomputation and the engine size that are fastest, if it fits at all."""
    engines = _engine_sizes(config, world_size, models[0].architecture)
    for recompute in _RECOMPUTE:
        options = []
        for engine in reversed(engines):  # the largest takes least memory
            candidate = changed(config, world_size, {**overrides, RECOMPUTE_KEY: recompute, ENGINE_KEY: engine})
            layout = candidate.config.parallel.layout(world_size)
            count = micro_batch_count(candidate.config, layout, lengths, models[0].max_tokens)
            memory = plan_memory(candidate.config, world_size, limit, micro_batches=count, models=models)
            if memory.worst.peak > (1 - TIGHT) * limit:
                break
            time = estimate_step(candidate.config, layout, gpu, lengths, models, memory)
            options.append(Found(candidate=candidate, memory=memory, time=time))
        if options:
            return min(options, key=lambda item: item.time.total)
    return None


def _layouts(config: RunConfig, world_size: int, architectures: Sequence[Architecture]) -> Iterator[Overrides]:
    """The parallel sizes that work, memory aside."""
    shape = architectures[0].shape
    tps = [size for size in _powers(GPUS_A_NODE) if size <= world_size]
    pps = [size for size in _powers(_LARGEST_PP) if size <= min(world_size, shape.num_layers)]
    cps = [size for size in _powers(_LARGEST_CP) if size <= world_size]
    eps = [size for size in _powers(shape.num_experts) if shape.num_experts % size == 0] if shape.is_moe else [1]
    for tp, pp, cp, ep, vpp in itertools.product(tps, pps, cps, eps, (1, 2)):
        stages = stage_overrides(shape.num_layers, pp)
        if stages is None or (vpp > 1 and pp == 1) or tp * pp * cp > world_size:
            continue
        for etp in sorted({None if tp == 1 else 1, None}, key=str) if shape.is_moe else [None]:
            overrides = {**tensor_overrides(tp), **stages, CP_KEY: cp, EP_KEY: ep, ETP_KEY: etp, VPP_KEY: vpp}
            if works(changed(config, world_size, {**overrides, ENGINE_KEY: 1}), architectures):
                yield overrides


def _engine_sizes(config: RunConfig, world_size: int, architecture: Architecture) -> list[int]:
    if config.rollout.engine != "sglang" or config.rollout.servers:
        return [config.rollout.tensor_model_parallel_size]
    sizes = [size for size in _powers(_LARGEST_ENGINE) if size <= world_size]
    return [size for size in sizes if world_size % size == 0 and architecture.shape.num_heads % size == 0]


def _powers(limit: int) -> list[int]:
    """1, 2, 4 … up to `limit`."""
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]
