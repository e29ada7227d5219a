"""The sync plan's bytes are those of the weight plan that syncs walk, and of a count element by element."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megarl.config.layout import Layout
from megarl.planning.architecture import Architecture, Split
from megarl.planning.hardware import COLLECTIVE_EFFICIENCY, GPU, GPUS, GPUS_A_NODE
from megarl.planning.sync_plan import (
    bucket_count,
    plan_sync,
    received_whole,
    shares_route,
    stage_tensors,
    whole_route,
)
from megarl.planning.weight_sections import sync_section
from megarl.weights.plan import EngineLayout, WeightPlan
from tests.planning.model_configs import DEEPSEEK_V3, LLAMA_70B, write_model
from tests.tiny_models import DENSE, MOE, hf_config
from tests.weights.placed import heads, placed

FAMILIES = (*DENSE, *MOE)
BFLOAT16 = 2
CASES = [
    ("llama", 16, {"tp": 2, "pp": 2}, {}),
    ("llama_tied", 16, {"pp": 4}, {"tp": 2}),
    ("qwen2", 32, {"tp": 4, "pp": 2, "vpp": 2}, {}),
    ("qwen3", 8, {"cp": 2}, {}),
    ("qwen3_moe", 16, {"tp": 2, "pp": 2, "ep": 4, "etp": 1}, {"tp": 4, "ep": 4}),
    ("qwen2_moe", 16, {"ep": 4, "pp": 2}, {"tp": 8, "ep": 2}),
    ("mixtral", 32, {"tp": 4, "ep": 4, "pp": 2}, {}),
    ("glm4_moe", 16, {"tp": 2, "ep": 2, "etp": 2, "cp": 2}, {"tp": 2, "ep": 2}),
    ("deepseek_v3", 16, {"tp": 2, "pp": 2, "ep": 2, "first_stage_layers": 1, "last_stage_layers": 3}, {}),
]
H100 = GPUS["h100"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        hf_config(name).save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(("model", "ranks", "sizes", "engine"), CASES, ids=str)
def test_whole_tensors_take_the_bytes_of_the_weight_plan(
    models: Path, model: str, ranks: int, sizes: dict, engine: dict
) -> None:
    layout, config = Layout(world_size=ranks, **sizes), hf_config(model)
    plan = WeightPlan(
        placed(config, layout),
        layout,
        EngineLayout(**engine),
        num_experts=heads(config).experts,
        bucket_bytes=2**20,
        ranks_per_node=GPUS_A_NODE,
    )
    architecture = Architecture.from_hf(models / model)
    streams = [list(stage_tensors(architecture, layout, stage, BFLOAT16)) for stage in range(layout.pp)]
    totals = [
        {split: sum(tensors.total for tensors in stream if tensors.split is split) for split in Split}
        for stream in streams
    ]
    for rank in range(ranks):
        own = within = across = 0
        for step in plan.steps(rank):
            own += sum(entry.num_bytes for entry in step.entries)
            for message in step.receives:
                num_bytes = sum(item.num_bytes for item in message.items)
                own -= num_bytes
                if message.source // GPUS_A_NODE == rank // GPUS_A_NODE:
                    within += num_bytes
                else:
                    across += num_bytes
        shares = plan.engine.ep
        counted = received_whole(layout, totals, rank, plan.engine.expert_rank(rank), shares)
        # The vocabulary is padded, so the last of its ranks holds a little less of it.
        assert counted == pytest.approx((own, within, across), rel=0.02, abs=1)


@pytest.mark.parametrize("model", FAMILIES)
def test_tensors_have_the_sizes_of_the_stream(models: Path, model: str) -> None:
    layout, architecture = Layout(world_size=4, pp=2, vpp=2), Architecture.from_hf(models / model)
    found = (tensors for stage in range(layout.pp) for tensors in stage_tensors(architecture, layout, stage, BFLOAT16))
    real = sorted(tensor.num_bytes for tensor in placed(hf_config(model), layout))
    assert sorted(t.num_bytes for t in found for _ in range(t.count)) == real


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


def test_whole_tensors_of_70b_cross_nodes_but_for_what_the_node_holds(tmp_path: Path) -> None:
    architecture = Architecture.from_hf(write_model(tmp_path, LLAMA_70B))
    num_bytes = 2 * 70_553_706_496  # the paper's count (arXiv:2407.21783), two bytes each
    across = whole_route(architecture, Layout(world_size=64, tp=8, pp=4), H100, BFLOAT16)
    # A node has one stage of four, and the last ones a little less: the first has the embedding as the last the head.
    assert across.across_nodes == pytest.approx(0.75 * num_bytes, rel=0.02)
    assert across.seconds == pytest.approx(across.across_nodes / (50e9 * COLLECTIVE_EFFICIENCY))
    within = whole_route(architecture, Layout(world_size=8, tp=8), H100, BFLOAT16)
    assert within.seconds == pytest.approx(0.875 * num_bytes / (450e9 * COLLECTIVE_EFFICIENCY), rel=0.001)
    assert within.across_nodes == 0
    assert within.within_node + within.own == pytest.approx(num_bytes)


def test_an_engine_with_expert_parallelism_spares_671b_most_of_its_traffic(tmp_path: Path) -> None:
    """A rank then gets the 17B weights that are not of routed experts, and its share of the others."""
    architecture = Architecture.from_hf(write_model(tmp_path, DEEPSEEK_V3))
    layout = Layout(world_size=512, tp=8, pp=16, ep=32, etp=1, first_stage_layers=3, last_stage_layers=2)
    whole = whole_route(architecture, layout, H100, BFLOAT16, 32)
    shared = whole_route(architecture, layout, H100, BFLOAT16, 32, 32)
    experts = 58 * 256 * 3 * 7168 * 2048
    total = lambda route: route.own + route.within_node + route.across_nodes
    assert total(whole) == pytest.approx(2 * 671_026_419_200, rel=1e-6)
    assert total(shared) == pytest.approx(2 * (671_026_419_200 - experts + experts / 32), rel=1e-6)
    assert shared.seconds < whole.seconds / 15


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
