"""Critics and reward models come from every kind of Hugging Face model, and go back to transformers' classifiers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.launch import torchrun
from tests.tiny_models import make_hf_model
from tests.weights.scalar_heads import PADDING

TOLERANCE = 1e-5
CLASSES = {
    "critic": (transformers.AutoModelForTokenClassification, "ForTokenClassification"),
    "reward": (transformers.AutoModelForSequenceClassification, "ForSequenceClassification"),
}
LAYOUTS: dict[str, tuple[int, dict]] = {
    "one": (1, {}),
    "TP2": (2, {"tp": 2}),
    "PP2": (2, {"pp": 2}),
    "TP2 PP2": (4, {"tp": 2, "pp": 2}),
}
SOURCES = {
    "lm": ("qwen2_tied", transformers.AutoModelForCausalLM, {"pad_token_id": PADDING}),
    "untied lm": ("qwen3", transformers.AutoModelForCausalLM, {"pad_token_id": PADDING}),
    "sequence classifier": (
        "llama",
        transformers.AutoModelForSequenceClassification,
        {"num_labels": 1, "pad_token_id": PADDING},
    ),
    "token classifier": ("qwen2", transformers.AutoModelForTokenClassification, {"num_labels": 1}),
    "five labels": ("llama", transformers.AutoModelForSequenceClassification, {"num_labels": 5}),
}
GOOD = {
    "critic of lm": ("critic", "lm"),
    "reward of lm": ("reward", "lm"),
    "reward of untied lm": ("reward", "untied lm"),
    "critic of sequence classifier": ("critic", "sequence classifier"),
    "reward of sequence classifier": ("reward", "sequence classifier"),
    "critic of token classifier": ("critic", "token classifier"),
}
BAD = {
    "five labels": ("reward", "five labels"),
    "another hidden size": ("critic", "another hidden size"),
    "another vocabulary": ("critic", "another vocabulary"),
    "a bias": ("reward", "token classifier"),
}
SENTENCES = {
    "five labels": ["the model has 5 labels", "score.weight", "num_labels 1"],
    "another hidden size": ["model.safetensors", "[262, 64]", "config.json implies [262, 96]"],
    "another vocabulary": ["model.safetensors", "[262, 64]", "config.json implies [300, 64]"],
    "a bias": ["score.bias", "qwen2 reward model has no place"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (family, auto_class, changes) in SOURCES.items():
        make_hf_model(family, folder / name, auto_class=auto_class, **changes)
    for name, key, value in (("another hidden size", "hidden_size", 96), ("another vocabulary", "vocab_size", 300)):
        config_file = make_hf_model("llama", folder / name) / "config.json"
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {key: value}))
    return folder


@pytest.fixture(scope="module")
def outputs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for layout, (ranks, sizes) in LAYOUTS.items():
        folders[layout] = tmp_path_factory.mktemp("output")
        cases = json.dumps(GOOD | BAD)
        torchrun(ranks, "tests/weights/scalar_heads.py", models, folders[layout], cases, json.dumps(sizes))
    return folders


def result(outputs: dict[str, Path], layout: str, case: str) -> dict:
    return json.loads((outputs[layout] / "results.json").read_text())[case]


@pytest.mark.parametrize("case", GOOD)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_gives_the_same_values_here_and_in_transformers(outputs: dict, layout: str, case: str) -> None:
    found = result(outputs, layout, case)
    assert found["read again"] == 0
    assert found["read by transformers"] < TOLERANCE


@pytest.mark.parametrize("case", GOOD)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
def test_values_are_those_of_one_rank_also_with_a_new_head(outputs: dict, layout: str, case: str) -> None:
    expected, found = (result(outputs, name, case)["values"] for name in ("one", layout))
    for row, expected_row in zip(found, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_finds_its_class_and_misses_no_weight(outputs: dict, layout: str) -> None:
    for name, (role, _) in GOOD.items():
        auto_class, suffix = CLASSES[role]
        model, loading = auto_class.from_pretrained(outputs[layout] / name, output_loading_info=True)
        assert not any(loading.values()), loading
        assert model.config.num_labels == 1
        assert model.config.architectures == [type(model).__name__]
        assert type(model).__name__.endswith(suffix)


def test_a_new_critic_expects_nothing_and_a_new_reward_model_tells_tokens_apart(outputs: dict) -> None:
    critic = load_file(outputs["TP2 PP2"] / "critic of lm" / "model.safetensors")
    assert not critic["score.weight"].any() and not critic["score.bias"].any()
    reward = load_file(outputs["TP2 PP2"] / "reward of lm" / "model.safetensors")["score.weight"]
    assert reward.std().item() == pytest.approx(1 / 65**0.5, rel=0.3)


def test_a_head_that_is_there_is_kept(models: Path, outputs: dict) -> None:
    before = load_file(models / "sequence classifier" / "model.safetensors")
    for name in ("critic of sequence classifier", "reward of sequence classifier"):
        after = load_file(outputs["PP2"] / name / "model.safetensors")
        assert torch.equal(after["score.weight"], before["score.weight"])
    before = load_file(models / "token classifier" / "model.safetensors")
    after = load_file(outputs["TP2"] / "critic of token classifier" / "model.safetensors")
    assert torch.equal(after["score.bias"], before["score.bias"]) and before["score.bias"].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_does_not_fit_is_refused_in_a_sentence(outputs: dict, layout: str) -> None:
    for case, wanted in SENTENCES.items():
        problem = result(outputs, layout, case)["problem"]
        for part in wanted:
            assert part in problem
        assert "\n" not in problem
