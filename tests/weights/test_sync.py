"""Syncs on real ranks: engines get their models' folders bit by bit, in every layout; faults are named on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import torchrun
from tests.spawn import run_ranks
from tests.tiny_models import DENSE, MOE, make_hf_model
from tests.weights.sync_faults import NORM, faults, peak, wrong_sender

FAMILIES = (*DENSE, *MOE)
TP2, TP2_EP2 = {"tp": 2}, {"tp": 2, "ep": 2}
UNEVEN = {"pp": 2, "cp": 2, "first_stage_layers": 1, "last_stage_layers": 3}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"layout": {"tp": 2}, "engine": {}, "models": FAMILIES},
        {"layout": {"pp": 2}, "engine": TP2, "models": FAMILIES},
        {"layout": {"ep": 2}, "engine": TP2_EP2, "models": MOE},
        {"layout": {"cp": 2}, "engine": TP2, "models": ("llama", "qwen3_moe")},
        {"layout": {}, "engine": {}, "models": ("qwen2_tied", "deepseek_v3")},
        {"layout": {"pp": 2}, "engine": {"tp": 2, "by_first_rank": True}, "models": ("llama", "qwen3_moe")},
        {"layout": {"ep": 2}, "engine": {"tp": 2, "by_first_rank": True}, "models": ("qwen3_moe",)},
    ],
    4: [
        {"layout": {"tp": 2, "pp": 2}, "engine": TP2, "models": ("llama_tied", "qwen3", "deepseek_v3")},
        {"layout": {"tp": 2, "ep": 2, "etp": 1}, "engine": TP2_EP2, "models": MOE},
        {"layout": {"pp": 2, "ep": 2, "vpp": 2}, "engine": {"tp": 4, "ep": 2}, "models": ("qwen2_moe", "deepseek_v3")},
        {"layout": {"tp": 4}, "engine": {}, "models": ("llama", "qwen2", "mixtral")},  # two key-value heads
        {"layout": UNEVEN, "engine": TP2_EP2, "models": ("qwen3_moe", "glm4_moe")},
    ],
}
BUCKET_BYTES = 100_000
NAMES = [
    (ranks, f"{model} {case['layout']} {case['engine']}")
    for ranks, cases in CASES.items()
    for case in cases
    for model in case["models"]
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        make_hf_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def synced(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[str, Any]]:
    """What `sync_ranks` found, by number of ranks and case."""
    found = {}
    for ranks, cases in CASES.items():
        file = tmp_path_factory.mktemp("synced") / "results.json"
        cases = [{**case, "bucket_bytes": BUCKET_BYTES} for case in cases]
        torchrun(ranks, "tests/weights/sync_ranks.py", models, file, json.dumps(cases), timeout=200)
        found.update({(ranks, name): result for name, result in json.loads(file.read_text()).items()})
    return found


@pytest.mark.parametrize("case", NAMES, ids=str)
def test_engines_get_their_share_of_the_models_folder_bit_by_bit(synced: dict, case: tuple[int, str]) -> None:
    assert synced[case]["problems"] == []


@pytest.mark.parametrize("case", NAMES, ids=str)
def test_the_plan_that_nobody_was_asked_for_is_what_the_ranks_hold(synced: dict, case: tuple[int, str]) -> None:
    assert synced[case]["placed"]


@pytest.mark.parametrize("case", NAMES, ids=str)
def test_all_buckets_are_in_one_piece_of_memory_of_the_size_asked_for(synced: dict, case: tuple[int, str]) -> None:
    result = synced[case]
    assert set(result["memories"]) == {1}
    assert max(size for sizes in result["buckets"] for size in sizes) <= BUCKET_BYTES
    assert len({len(sizes) for sizes in result["buckets"]}) == 1  # ranks of one engine take them together


def test_replicas_send_one_another_nothing(synced: dict) -> None:
    """Data- and context-parallel ranks, and expert-parallel ones whose engine has experts where the trainer does."""
    for name in ("llama {'cp': 2} {'tp': 2}", "qwen2_tied {} {}", "deepseek_v3 {'ep': 2} {'tp': 2, 'ep': 2}"):
        assert [traffic["received"] for traffic in synced[2, name]["traffic"]] == [0, 0]


def test_each_byte_that_a_rank_lacks_travels_once(synced: dict) -> None:
    result = synced[4, "qwen3 {'tp': 2, 'pp': 2} {'tp': 2}"]
    received = [traffic["received"] for traffic in result["traffic"]]
    assert sum(received) == sum(traffic["sent"] for traffic in result["traffic"])
    assert [traffic["taken"] for traffic in result["traffic"]] == [result["total"]] * 4
    # Of four ranks that share out all matrices each lacks three quarters, and norms of the other stage.
    assert received == pytest.approx([0.75 * result["total"]] * 4, rel=0.02)


@pytest.fixture(scope="module")
def told(models: Path) -> list[dict[str, str]]:
    return run_ranks(faults, 2, models / "llama", {"pp": 2}, timeout=200)


def test_a_wrong_byte_in_one_ranks_bucket_is_named_on_all_ranks(told: list[dict[str, str]]) -> None:
    sentence = (
        f"WeightUpdateError: sync of the weights of version 1: rank 1's engine failed: {NORM} arrived changed: its "
        "checksum is not the one of the trainer's weights (found by rank 1)"
    )
    assert [one["wrong byte"] for one in told] == [sentence] * 2


def test_an_engine_that_dies_or_refuses_is_named_on_all_ranks_and_none_hangs(told: list[dict[str, str]]) -> None:
    assert {one["dead"] for one in told} == {
        "WeightUpdateError: sync of the weights of version 2: rank 1's engine failed: the engine's process is gone "
        "(found by rank 1)"
    }
    assert "the engine's weights are asleep" in told[0]["refused"]
    assert told[0]["refused"] == told[1]["refused"]


def test_the_sync_after_a_failed_one_serves_all(told: list[dict[str, str]]) -> None:
    assert [one["sound"] for one in told] == ["version 4"] * 2


def test_a_byte_that_changes_between_two_ranks_is_caught_too(models: Path) -> None:
    """Checksums are of the parameters of the ranks that hold them, not of what came."""
    sentences = run_ranks(wrong_sender, 2, models / "llama", timeout=200)
    assert sentences[0] == sentences[1]
    assert "arrived changed" in sentences[0]
    assert sentences[0].endswith("(found by rank 0)")


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_sync_takes_no_more_memory_than_two_buckets(layout: dict[str, int], tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1000, "head_dim": 64}
    folder = make_hf_model("llama", tmp_path, **sizes)
    bucket_bytes, arithmetic = 3 * 2**20, 2 * 2**20  # what checksums take whatever the size of tensors
    for found, moved in run_ranks(peak, 2, folder, layout, bucket_bytes, timeout=200):
        assert moved > 5 * bucket_bytes
        assert bucket_bytes < found <= 2 * bucket_bytes + arithmetic
