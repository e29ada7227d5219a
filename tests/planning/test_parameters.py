"""Counts of weights at full size, beside the numbers that the models' publishers give."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.layout import Layout
from megarl.planning.architecture import Architecture
from megarl.planning.parameters import engine_parameters, model_parameters, stage_chunks, stage_parameters
from tests.planning.model_configs import (
    DEEPSEEK_V3,
    LLAMA_8B,
    LLAMA_70B,
    QWEN3_30B_A3B,
    QWEN3_32B,
    QWEN3_235B_A22B,
    write_model,
)

PUBLISHED_COUNTS = {
    # From the safetensors metadata on each model's Hugging Face page.
    "Llama-3.1-8B": (LLAMA_8B, 8_030_261_248),
    "Llama-3.1-70B": (LLAMA_70B, 70_553_706_496),
    "Qwen3-32B": (QWEN3_32B, 32_762_123_264),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Qwen3-235B-A22B": (QWEN3_235B_A22B, 235_093_634_560),
    # transformers' DeepseekV3ForCausalLM without its 58 × 256 expert biases, which are buffers.
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
}
V3_LAYOUT = Layout(world_size=512, tp=8, pp=16, ep=32, etp=1, first_stage_layers=3, last_stage_layers=2)


@pytest.mark.parametrize("name", PUBLISHED_COUNTS)
def test_whole_models_have_as_many_weights_as_published(name: str, tmp_path: Path) -> None:
    values, expected = PUBLISHED_COUNTS[name]
    assert model_parameters(Architecture.from_hf(write_model(tmp_path, values))) == expected


def test_the_largest_rank_of_deepseek_v3_has_2_95_gib_of_weights(tmp_path: Path) -> None:
    """As Megatron-Core's own modules have at TP8 × PP16 × EP32."""
    architecture = Architecture.from_hf(write_model(tmp_path, DEEPSEEK_V3))
    largest = max(stage_parameters(architecture, V3_LAYOUT, stage).total for stage in range(16))
    assert round(2 * largest / 2**30, 2) == 2.95


def test_the_ranks_of_a_layout_hold_every_weight_once(tmp_path: Path) -> None:
    """What is shared out adds up to the model; what every rank has is known."""
    architecture = Architecture.from_hf(write_model(tmp_path, QWEN3_30B_A3B))
    layout = Layout(world_size=32, tp=2, pp=4, ep=8, etp=1)
    experts = sum(stage_parameters(architecture, layout, stage).expert for stage in range(4)) * 8
    assert experts == 48 * 128 * 3 * 2048 * 768
    dense = sum(stage_parameters(architecture, layout, stage).dense for stage in range(4))
    whole = model_parameters(architecture) - experts
    on_every_rank = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048  # norms and routers
    assert 2 * (dense - on_every_rank) == whole - on_every_rank


@pytest.mark.parametrize(
    "layout",
    [
        Layout(world_size=4, pp=4),
        Layout(world_size=2, pp=2, vpp=4),
        Layout(world_size=4, pp=4, vpp=2, first_stage_layers=2, last_stage_layers=4),
    ],
    ids=Layout.describe,
)
def test_chunks_in_the_order_of_the_pipeline_have_all_layers_in_order(layout: Layout) -> None:
    layers = 16 if layout.first_stage_layers is None else 14
    stages = [stage_chunks(layout, layers, stage) for stage in range(layout.pp)]
    in_order = [stages[stage][virtual].layers for virtual in range(layout.vpp) for stage in range(layout.pp)]
    assert [layer for chunk in in_order for layer in chunk] == list(range(layers))
    assert [chunk.is_first for chunks in stages for chunk in chunks].count(True) == 1
    assert stages[-1][-1].is_last


def test_an_engine_of_eight_ranks_holds_an_eighth_but_for_what_every_rank_has(tmp_path: Path) -> None:
    architecture = Architecture.from_hf(write_model(tmp_path, LLAMA_70B))
    norms = 80 * 2 * 8192 + 8192
    assert engine_parameters(architecture, 8) == (70_553_706_496 - norms) / 8 + norms
