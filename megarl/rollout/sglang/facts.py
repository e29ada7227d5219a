"""What a run and a server of its own have to have alike, and where they do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megarl
from megarl.config.sglang_options import DEFAULT_MASK, MASK_OPTION
from megarl.rollout.sglang.options import EngineSettings

_MAY_DIFFER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Of a model's config.json: what two copies of one model may have otherwise."""


def engine_facts(settings: EngineSettings, tensor_parallel_size: int, *, backend: str) -> dict[str, Any]:
    """By the name of what decides it.

    Args:
        backend: `nccl` or `gloo`: what weights come by.
    """
    return {
        "megarl's version": megarl.__version__,
        "model.path": f"a model with the config.json {_digest(settings.model_path)}",
        "model.dtype": settings.dtype,
        "rollout.tensor_model_parallel_size": tensor_parallel_size,
        "data.max_prompt_length + data.max_response_length": settings.max_tokens,
        "actor.router_replay.mode": "R3" if settings.return_routed_experts else "another than R3",
        f"rollout.sglang.{MASK_OPTION}": settings.options.get(MASK_OPTION, DEFAULT_MASK),
        "the backend of weights": backend,
    }


def difference(of_run: Mapping[str, Any], of_server: Mapping[str, Any]) -> str | None:
    """The first thing that a run and a server have not alike, in a sentence's part; None: all is alike."""
    for name in {**of_server, **of_run}:
        theirs, ours = of_server.get(name), of_run.get(name)
        if theirs != ours:
            return f"it was started with {name}: {theirs}, and this run has {ours}"
    return None


def _digest(model_path: str) -> str:
    config = json.loads(Path(model_path, "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in _MAY_DIFFER}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
