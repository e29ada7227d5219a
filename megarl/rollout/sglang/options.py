"""The arguments of SGLang's `Engine`, from a run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.schema import RunConfig
from megarl.rollout.sglang.placement import Placement

RESERVED_POSITIONS = 2
"""SGLang 0.5.23 generates up to two tokens less than its context length (tp_worker.py:568, scheduler.py:2714)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What a run says about its engines."""

    model_path: str
    dtype: str
    """`float32` or `bfloat16`, of weights and arithmetic."""
    max_tokens: int
    """Longest prompt and response together, in tokens."""
    max_num_seqs: int
    """Sequences that are decoded at once."""
    gpu_memory_utilization: float
    """Share of a GPU's memory for weights and KV cache; without meaning on a CPU."""
    seed: int
    return_routed_experts: bool = False
    options: Mapping[str, Any]
    """`rollout.sglang`: any other argument, by SGLang's name."""


def engine_settings(config: RunConfig) -> EngineSettings:
    """What a run's config says."""
    rollout = config.rollout
    return EngineSettings(
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_tokens=config.data.max_prompt_length + config.data.max_response_length,
        max_num_seqs=rollout.max_num_seqs,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        seed=config.trainer.seed,
        return_routed_experts=config.actor.router_replay.mode == "R3",
        options=rollout.sglang,
    )


def engine_arguments(
    settings: EngineSettings, placement: Placement, *, on_cpu: bool, address: str | None, gives_memory_back: bool = True
) -> dict[str, Any]:
    """Keyword arguments of `sglang.srt.entrypoints.engine.Engine` for one node's part of an engine.

    Args:
        address: `host:port` at which the nodes of one engine meet; None on one node.
        gives_memory_back: whether the engine shares its GPUs with a trainer.
    """
    arguments: dict[str, Any] = {
        "model_path": settings.model_path,
        "dtype": settings.dtype,
        "tp_size": placement.size,
        "nnodes": placement.nodes,
        "node_rank": placement.node,
        "dist_init_addr": address,
        "context_length": settings.max_tokens + RESERVED_POSITIONS,
        "max_running_requests": settings.max_num_seqs,
        # Engines draw from one generator each; with one seed they would all draw the same.
        "random_seed": (settings.seed + placement.engine) % 2**31,
        # Token ids only: text never passes through an engine.
        "skip_tokenizer_init": True,
        # The trainer's weights come before anything is generated, so none are read from disk.
        "load_format": "dummy",
        "log_level": "error",
        # While the trainer computes, each scheduler would keep a core busy with waiting.
        "sleep_on_idle": True,
        "enable_return_routed_experts": settings.return_routed_experts,
    }
    return {
        **arguments,
        **(_cpu(settings) if on_cpu else _cuda(settings, placement, gives_memory_back)),
        **settings.options,
    }


def _cpu(settings: EngineSettings) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        # Without this SGLang would take most of the machine's memory for its cache.
        "max_total_tokens": settings.max_num_seqs * (settings.max_tokens + RESERVED_POSITIONS),
    }


def _cuda(settings: EngineSettings, placement: Placement, gives_memory_back: bool) -> dict[str, Any]:
    return {
        "base_gpu_id": placement.base_device,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "enable_memory_saver": gives_memory_back,
    }
