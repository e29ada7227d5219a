"""Checkpoints of weights load in any layout, and refuse what is not theirs."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

from megarl.checkpoint.manifest import read_manifest
from megarl.config.errors import ConfigError
from tests.checkpoint import ranks
from tests.spawn import run_ranks
from tests.tiny_models import make_hf_model

MODELS = ["llama", "qwen2_tied", "qwen3_moe"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Hugging Face folders; `llama` has a tokenizer file to travel along."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make_hf_model(name, folder / name)
    make_hf_model("llama", folder / "llama_deeper", num_hidden_layers=6)
    (folder / "llama" / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def single(models, tmp_path_factory):
    """Checkpoints that one process saved."""
    folder = tmp_path_factory.mktemp("single")
    run_ranks(ranks.save_in, 1, {}, models, folder, MODELS)
    return folder


@pytest.fixture(scope="module")
def four(models, single, tmp_path_factory):
    """What four ranks found, and where they saved."""
    folder = tmp_path_factory.mktemp("four")
    results = run_ranks(ranks.save_and_load_in_four, 4, models, single, folder, MODELS, folder / "full", timeout=200)
    return folder, results


def everything_is_equal(results: dict) -> bool:
    return all(case["different"] == [] and case["padding"] == 0.0 for case in results.values())


def test_what_one_process_saved_loads_into_tp2_pp2_bit_for_bit(four):
    for rank_results in four[1]:
        assert len(rank_results["of one process"]) == len(MODELS)
        assert everything_is_equal(rank_results["of one process"])


def test_what_tp2_pp2_saved_loads_into_other_layouts_bit_for_bit(four):
    """Among them virtual stages, a vocabulary padded for another TP, experts in parallel and context parallel."""
    for rank_results in four[1]:
        assert len(rank_results["of four"]) == 2 * len(MODELS) + 1
        assert everything_is_equal(rank_results["of four"])


def test_what_tp2_pp2_saved_loads_into_one_process_bit_for_bit(four, models):
    (results,) = run_ranks(ranks.load_in, 1, [{}], models, four[0], MODELS)
    assert len(results) == len(MODELS)
    assert everything_is_equal(results)


def test_a_full_disk_on_one_rank_is_told_on_all_and_leaves_nothing(four):
    folder, results = four
    messages = {rank_results["full disk"] for rank_results in results}
    assert messages == {f"cannot write {folder / 'full' / 'weights'}: File too large (found by rank 1)"}
    assert sorted(path.name for path in folder.iterdir()) == sorted(MODELS)


def test_the_manifest_says_what_the_checkpoint_is(four, models):
    manifest = read_manifest(four[0] / "qwen2_tied")
    reference = transformers.AutoModelForCausalLM.from_pretrained(models / "qwen2_tied")
    assert manifest.num_parameters == reference.num_parameters()
    assert (manifest.role, manifest.dtype, manifest.model_type) == ("causal_lm", "float32", "qwen2")
    assert (manifest.layout["tp"], manifest.layout["pp"]) == (2, 2)


def test_config_and_chat_template_travel_along(single, models):
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        assert (single / "llama" / "hf" / name).read_bytes() == (models / "llama" / name).read_bytes()


def test_a_bfloat16_checkpoint_loads_into_a_float32_model(models, tmp_path):
    assert run_ranks(ranks.bfloat16_to_float32, 1, models, tmp_path, "llama") == [True]


@pytest.fixture(scope="module")
def refusals(single, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    for what in ("truncated", "file missing", "no metadata", "common state truncated"):
        shutil.copytree(single / "llama", folder / what)
    (data,) = (folder / "truncated" / "weights").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:300_000])
    next((folder / "file missing" / "weights").glob("*.distcp")).unlink()
    (folder / "no metadata" / "weights" / ".metadata").unlink()
    common = folder / "common state truncated" / "weights" / "common.pt"
    common.write_bytes(common.read_bytes()[:100])
    damaged = {path.name: path for path in folder.iterdir()}
    return run_ranks(ranks.refused_loads, 1, models, single, damaged)[0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("another family", ["qwen2_tied", "another model", "model_type is qwen2, here it is llama"]),
        ("more layers", ["another model", "[4, ", "[6, "]),
        ("another role", ["role is causal_lm, here it is critic"]),
        ("not a checkpoint", ["not a megarl checkpoint", "megarl.json"]),
        ("truncated", ["truncated", "incomplete or damaged"]),
        ("file missing", ["file missing", "incomplete or damaged", "No such file"]),
        ("no metadata", ["no metadata", "incomplete or damaged"]),
        ("common state truncated", ["common state truncated", "incomplete or damaged"]),
        ("target exists", ["exists", "nothing is overwritten"]),
    ],
)
def test_a_wrong_checkpoint_is_refused_in_one_sentence(refusals, what, words):
    assert all(word in refusals[what] for word in words), refusals[what]
    assert "\n" not in refusals[what]


def write_manifest(folder: Path, **changes: object) -> Path:
    content = {
        "format_version": 1,
        "megarl_version": "0.1.0",
        "role": "critic",
        "dtype": "bfloat16",
        "model_type": "llama",
        "num_parameters": 7,
        "layout": {"tp": 2},
        **changes,
    }
    text = json.dumps({key: value for key, value in content.items() if value is not None})
    (folder / "megarl.json").write_text(text)
    return folder


def test_a_manifest_of_a_newer_format_asks_for_a_newer_megarl(tmp_path):
    with pytest.raises(ConfigError, match=r"format_version 99, but this megarl reads up to 1; update megarl"):
        read_manifest(write_manifest(tmp_path, format_version=99))


def test_a_manifest_that_lacks_something_says_what(tmp_path):
    with pytest.raises(ConfigError, match="lacks dtype, role"):
        read_manifest(write_manifest(tmp_path, role=None, dtype=None))


def test_a_later_version_of_the_same_format_may_say_more(tmp_path):
    assert read_manifest(write_manifest(tmp_path, weight_version=12)).num_parameters == 7


def test_a_manifest_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "megarl.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_manifest(tmp_path)
