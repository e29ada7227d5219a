"""Estimates of a step's time beside what others measured, and their FLOPs beside the papers' formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megarl.config.layout import Layout
from megarl.config.schema import RunConfig
from megarl.planning.architecture import Architecture, Head
from megarl.planning.communication import forward_seconds
from megarl.planning.hardware import GPUS
from megarl.planning.memory import GIB, models_of, plan_memory
from megarl.planning.step_time import UNCERTAINTY, Lengths, StepTime, estimate_step, forward_flops
from tests.planning.model_configs import (
    DEEPSEEK_V3,
    LLAMA_70B,
    QWEN3_30B_A3B,
    QWEN3_32B,
    QWEN3_235B_A22B,
    write_model,
)

PROMPT = 128
"""Mean tokens of a prompt of OpenMathInstruct-2, which the published runs are on; the rest is the response."""


@dataclass(frozen=True)
class Published:
    """An on-policy GRPO run of NeMo-RL 0.4 on H100 (docs/about/performance-summary.md)."""

    name: str
    model: dict
    gpus: int
    samples: int
    mean_tokens: int
    max_tokens: int
    engine: int
    layout: dict[str, int]
    step_s: float


PUBLISHED = [
    Published("Qwen3-30B", QWEN3_30B_A3B, 32, 2048, 3154, 4096, 4, {"tp": 2, "ep": 8}, 225),
    Published("Qwen3-32B", QWEN3_32B, 32, 2048, 3206, 4096, 4, {"tp": 4, "pp": 4}, 393),
    Published("Qwen3-235B", QWEN3_235B_A22B, 128, 512, 5671, 8192, 16, {"tp": 2, "cp": 2, "ep": 16, "pp": 8}, 506),
    Published("DeepSeek-V3", DEEPSEEK_V3, 256, 512, 745, 1536, 32, {"ep": 16, "pp": 16}, 154),
]

UNEVEN = {(94, 8): (11, 11), (61, 16): (3, 2)}


def estimate(run: Published, folder: Path) -> StepTime:
    config = RunConfig()
    config.model.path = str(write_model(folder, run.model))
    config.model.recompute_granularity = "full"
    config.data.train_batch_size, config.rollout.n = run.samples // 32, 32
    config.actor.ppo_mini_batch_size = 512 // 32
    config.actor.use_kl_loss = True
    config.data.max_prompt_length, config.data.max_response_length = PROMPT, run.max_tokens - PROMPT
    config.actor.max_tokens_per_micro_batch = run.max_tokens
    config.rollout.engine, config.rollout.tensor_model_parallel_size = "sglang", run.engine
    config.rollout.max_num_seqs = 256
    parallel, sizes = config.parallel, run.layout
    parallel.tensor_model_parallel_size = sizes.get("tp", 1)
    parallel.pipeline_model_parallel_size = sizes.get("pp", 1)
    parallel.context_parallel_size = sizes.get("cp", 1)
    parallel.expert_model_parallel_size = sizes.get("ep", 1)
    parallel.expert_tensor_parallel_size = 1 if sizes.get("ep") else None
    ends = UNEVEN.get((run.model["num_hidden_layers"], sizes.get("pp", 1)), (None, None))
    parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage = ends
    models = models_of(config)
    layout = parallel.layout(run.gpus)
    assert layout.problems(models[0].architecture.shape) == []
    memory = plan_memory(config, run.gpus, 80 * GIB, micro_batches=8, models=models)
    assert memory.kv is not None
    # NeMo-RL moves the trainer's state to the host while it generates, so the cache has most of the GPU.
    roomy = replace(memory, kv=replace(memory.kv, given=30 * GIB))
    lengths = Lengths(prompt=PROMPT, response=run.mean_tokens - PROMPT)
    return estimate_step(config, layout, GPUS["h100"], lengths, models, roomy)


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)
def test_published_steps_are_estimated_within_the_stated_factor(run: Published, tmp_path: Path) -> None:
    found = estimate(run, tmp_path)
    assert run.step_s / UNCERTAINTY < found.total < run.step_s * UNCERTAINTY


def test_a_dense_token_costs_two_operations_a_weight(tmp_path: Path) -> None:
    """6 · N for forward and backward (arXiv:2001.08361), the embedding's lookup not counted."""
    architecture = Architecture.from_hf(write_model(tmp_path, LLAMA_70B))
    norms = 80 * 2 * 8192 + 8192
    matrices = 70_553_706_496 - 128256 * 8192 - norms
    assert forward_flops(architecture, 1, 0, Head.LOGITS) == 2 * matrices


def test_a_token_of_deepseek_v3_meets_37_billion_weights(tmp_path: Path) -> None:
    """The paper says 37 billion activated (arXiv:2412.19437), with the embedding."""
    architecture = Architecture.from_hf(write_model(tmp_path, DEEPSEEK_V3))
    active = forward_flops(architecture, 1, 0, Head.LOGITS) / 2 + 129280 * 7168
    assert active == pytest.approx(37e9, rel=0.02)


def test_causal_attention_costs_half_of_the_square(tmp_path: Path) -> None:
    architecture = Architecture.from_hf(write_model(tmp_path, LLAMA_70B))
    attention = forward_flops(architecture, 4096, 4096, Head.LOGITS) - forward_flops(architecture, 4096, 0, Head.LOGITS)
    # Two products of [4096, 128] matrices for each of 64 heads and 80 layers, 2 · 4096² · 128 operations each, halved.
    assert attention == 80 * 64 * 2 * (2 * 4096**2 * 128) / 2


def test_nothing_is_moved_within_one_rank_and_more_across_nodes(tmp_path: Path) -> None:
    architecture = Architecture.from_hf(write_model(tmp_path, QWEN3_30B_A3B))
    seconds = lambda **sizes: forward_seconds(architecture, Layout(world_size=64, **sizes), GPUS["h100"], 2, 8192)
    assert seconds() == 0
    assert 0 < seconds(ep=8) < seconds(ep=16)
    assert seconds(tp=2, etp=1) < seconds(tp=8, etp=1)
