"""The sync plan's bytes are those of real export plans and of a count element by element."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megarl.config.layout import Layout
from megarl.planning.architecture import Architecture, Split
from megarl.planning.hardware import COLLECTIVE_EFFICIENCY, GPU, GPUS, GPUS_A_NODE
from megarl.planning.sync_plan import (
    bucket_count,
    given_by_ranks,
    plan_sync,
    shares_route,
    stage_tensors,
    whole_route,
)
from megarl.planning.weight_sections import sync_section
from tests.launch import torchrun
from tests.planning.model_configs import DEEPSEEK_V3, LLAMA_70B, write_model
from tests.tiny_models import DENSE, MOE, hf_config

FAMILIES = (*DENSE, *MOE)
FLOAT32, BFLOAT16 = 4, 2
CASES = [
    {"layout": {"tp": 2}, "models": FAMILIES},
    {"layout": {"pp": 2}, "models": FAMILIES},
    {"layout": {"ep": 2}, "models": MOE},
    {"layout": {"pp": 2, "vpp": 2}, "models": ("qwen2", "qwen3_moe")},
]
NAMES = [(case["layout"], model) for case in CASES for model in case["models"]]
H100 = GPUS["h100"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        hf_config(name).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def real(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What two ranks' export plans give, by model and layout."""
    file = tmp_path_factory.mktemp("real") / "results.json"
    torchrun(2, "tests/planning/sync_ranks.py", models, file, json.dumps(CASES), timeout=280)
    return json.loads(file.read_text())


@pytest.mark.parametrize(("layout", "model"), NAMES, ids=str)
def test_ranks_give_what_the_real_export_plan_says(real: dict, models: Path, layout: dict, model: str) -> None:
    expected = real[f"{model} {layout}"]["given"]
    architecture = Architecture.from_hf(models / model)
    assert given_by_ranks(architecture, Layout(world_size=2, **layout), FLOAT32) == expected


@pytest.mark.parametrize(("layout", "model"), NAMES, ids=str)
def test_tensors_have_the_sizes_of_the_stream(real: dict, models: Path, layout: dict, model: str) -> None:
    whole, architecture = Layout(world_size=2, **layout), Architecture.from_hf(models / model)
    found = (tensors for stage in range(whole.pp) for tensors in stage_tensors(architecture, whole, stage, FLOAT32))
    assert sorted(t.num_bytes for t in found for _ in range(t.count)) == real[f"{model} {layout}"]["sizes"]


def counted_one_by_one(architecture: Architecture, layout: Layout, engine_size: int, rank: int) -> list[float]:
    """Own, near and far bytes of an engine rank: tensors as rows of elements, each looked up on every rank."""
    rows = layout.tp * layout.etp * engine_size
    place, received = layout.coordinates, [0.0, 0.0, 0.0]
    wanted = range(rank % engine_size * rows // engine_size, (rank % engine_size + 1) * rows // engine_size)
    for stage in range(layout.pp):
        for tensors in stage_tensors(architecture, layout, stage, BFLOAT16):
            copies = layout.ep if tensors.split is Split.EXPERT else 1
            for expert_rank in range(copies):
                for row in range(rows) if tensors.split is Split.WHOLE else wanted:
                    holders = [
                        other
                        for other in range(layout.world_size)
                        if place(other).pp == stage
                        and (tensors.split is not Split.TENSOR or place(other).tp == row * layout.tp // rows)
                        and (
                            tensors.split is not Split.EXPERT
                            or (place(other).ep, place(other).etp) == (expert_rank, row * layout.etp // rows)
                        )
                    ]
                    near = any(other // GPUS_A_NODE == rank // GPUS_A_NODE for other in holders)
                    where = 0 if rank in holders else 1 if near else 2
                    received[where] += tensors.total / rows / copies
    return received


@pytest.mark.parametrize(
    ("model", "layout", "engine_size"),
    [
        ("qwen3", {"tp": 2, "pp": 2}, 4),
        ("qwen3", {"tp": 4}, 2),
        ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 4, "etp": 1}, 8),
        ("glm4_moe", {"tp": 2, "ep": 2, "etp": 2, "cp": 2}, 2),
    ],
)
def test_shares_are_those_of_a_count_element_by_element(
    models: Path, model: str, layout: dict, engine_size: int
) -> None:
    whole, architecture = Layout(world_size=16, **layout), Architecture.from_hf(models / model)
    # Only the bytes matter here: with a slow network the rank that receives most from other nodes waits longest.
    slow = dataclasses.replace(H100, network=1.0)
    route = shares_route(architecture, whole, slow, BFLOAT16, engine_size)
    counted = [counted_one_by_one(architecture, whole, engine_size, rank) for rank in range(16)]
    assert [route.own, route.within_node, route.across_nodes] == pytest.approx(counted[route.rank])
    assert route.across_nodes == pytest.approx(max(far for _, _, far in counted))


def test_an_engine_that_is_cut_as_the_trainer_needs_nothing_from_others(models: Path) -> None:
    architecture = Architecture.from_hf(models / "llama")
    route = shares_route(architecture, Layout(world_size=8, tp=4), H100, BFLOAT16, 4)
    assert (route.within_node, route.across_nodes, route.seconds) == (0, 0, 0)


def test_one_rank_moves_nothing(models: Path) -> None:
    architecture = Architecture.from_hf(models / "llama")
    for route in (
        whole_route(architecture, Layout(), H100, BFLOAT16),
        shares_route(architecture, Layout(), H100, BFLOAT16, 1),
    ):
        assert (route.within_node, route.across_nodes, route.seconds) == (0, 0, 0)


def test_whole_tensors_of_70b_take_their_bytes_over_one_adapter(tmp_path: Path) -> None:
    architecture = Architecture.from_hf(write_model(tmp_path, LLAMA_70B))
    num_bytes = 2 * 70_553_706_496  # the paper's count (arXiv:2407.21783), two bytes each
    across = whole_route(architecture, Layout(world_size=64, tp=8, pp=4), H100, BFLOAT16)
    assert across.seconds == pytest.approx(num_bytes / (50e9 * COLLECTIVE_EFFICIENCY))
    # Nodes 1, 3, 5 and 7 hold copies of what the nodes before them give.
    assert (across.rank, across.across_nodes) == (8, num_bytes)
    within = whole_route(architecture, Layout(world_size=8, tp=8), H100, BFLOAT16)
    assert within.seconds == pytest.approx(num_bytes / (450e9 * COLLECTIVE_EFFICIENCY))
    assert within.across_nodes == 0
    assert within.within_node + within.own == num_bytes


def test_shares_of_671b_take_what_nemo_rl_published(tmp_path: Path) -> None:
    """DeepSeek-V3 from PP16 × EP16 to TP32: 2.39-2.83 s on H100 (docs/design-docs/nccl-reshard-refit.md)."""
    architecture = Architecture.from_hf(write_model(tmp_path, DEEPSEEK_V3))
    layout = Layout(world_size=256, pp=16, ep=16, etp=1, first_stage_layers=3, last_stage_layers=2)
    found = shares_route(architecture, layout, H100, BFLOAT16, 32)
    assert 2.39 / 2 < found.seconds < 2.83 * 2


def test_the_plan_of_671b_counts_every_tensor_and_its_buckets(tmp_path: Path) -> None:
    architecture = Architecture.from_hf(write_model(tmp_path, DEEPSEEK_V3))
    layout = Layout(world_size=512, tp=8, pp=16, ep=32, etp=1, first_stage_layers=3, last_stage_layers=2)
    plan = plan_sync(architecture, layout, H100, element_bytes=BFLOAT16, engine_size=32, bucket_bytes=2**30)
    assert plan.tensors == 45395  # of the published index, without the multi-token-prediction layer and the scales
    assert plan.num_bytes == 2 * 671_026_419_200 + 58 * 256 * 2  # expert biases are float32
    assert plan.num_bytes / 2**30 <= plan.buckets < 1.1 * plan.num_bytes / 2**30
    assert plan.engines == 16
    text = "\n".join(sync_section(plan, 671_026_419_200, H100).lines)
    assert "engines: 16 of 32 ranks; 1,342.1 GB in 45,395 tensors" in text
    assert "buckets of 1024 MiB" in text
    assert "published: DeepSeek-V3 671B" in text
    assert "30B" not in text  # too small to say anything


@pytest.mark.parametrize(
    ("sizes", "buckets"), [([], 0), ([1], 1), ([10], 1), ([11], 1), ([5, 5, 1], 2), ([6, 6, 6], 3), ([11, 1], 2)]
)
def test_buckets_are_filled_in_order(sizes: list[int], buckets: int) -> None:
    assert bucket_count(sizes, 10) == buckets


def test_a_faster_network_shortens_what_crosses_nodes(models: Path) -> None:
    architecture, layout = Architecture.from_hf(models / "qwen3"), Layout(world_size=16, tp=2, pp=2)

    def seconds(gpu: GPU) -> float:
        return whole_route(architecture, layout, gpu, BFLOAT16).seconds

    assert seconds(dataclasses.replace(H100, network=100e9)) == pytest.approx(seconds(H100) / 2)
