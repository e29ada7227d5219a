"""The layout never changes the mathematics: loss, gradient and weights agree between layouts and with autograd."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import transformers

from tests.distributed.layout_proof import (
    TOLERANCE,
    checkpoint_gradients,
    load,
    relative,
    train_in_layouts,
    transformers_loss,
    transformers_model,
    worst,
)
from tests.tiny_models import make_hf_model

MODELS = ("llama", "qwen2", "qwen2_tied", "qwen3")

LAYOUTS = {
    1: {"one": {}, "one recompute full": {}, "one recompute selective": {}},
    2: {
        "TP2": {"tp": 2, "sequence_parallel": False},
        "TP2 SP": {"tp": 2},
        "PP2": {"pp": 2},
        "PP2 VPP2": {"pp": 2, "vpp": 2},
        "CP2": {"cp": 2},
        "DP2": {},
    },
    4: {
        "TP2 PP2": {"tp": 2, "pp": 2},
        "TP2 CP2": {"tp": 2, "cp": 2},
        "PP2 CP2": {"pp": 2, "cp": 2},
        "TP4": {"tp": 4},  # pads the vocabulary, and has more ranks than key-value heads
    },
    8: {"TP2 PP2 DP2": {"tp": 2, "pp": 2}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make_hf_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    runs = list(itertools.product(MODELS, [False, True]))
    for ranks, layouts in LAYOUTS.items():
        cases = [
            {"name": name, "layout": layout, "runs": runs, "model_config": _recompute(name)}
            for name, layout in layouts.items()
        ]
        train_in_layouts(ranks, cases, models, folder)
    return folder


def _recompute(name: str) -> dict[str, str]:
    return {"recompute_granularity": name.split("recompute ")[1]} if "recompute" in name else {}


@pytest.mark.parametrize("model", MODELS)
def test_one_process_gradients_equal_autograd_of_transformers(results: Path, models: Path, model: str) -> None:
    reference = transformers_model(models / model)
    loss = transformers_loss(reference)
    loss.backward()
    expected = checkpoint_gradients(reference)
    found = load(results, "one", model, False)
    assert found["losses"][0] == pytest.approx(loss.item(), rel=TOLERANCE)
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm().item()
    assert found["grad_norms"][0] == pytest.approx(norm, rel=TOLERANCE)
    distance, name = worst(found["grads"], expected, leave_out="k_proj.bias")
    assert distance < TOLERANCE, name


@pytest.mark.parametrize("distributed", [False, True], ids=["optimizer", "distributed optimizer"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_a_step_is_the_same_in_every_layout(results: Path, layout: str, model: str, distributed: bool) -> None:
    expected, found = load(results, "one", model, False), load(results, layout, model, distributed)
    assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=TOLERANCE)
    distance, name = worst(found["weights"], expected["weights"])
    assert distance < TOLERANCE, name


@pytest.mark.parametrize("distributed", [False, True], ids=["optimizer", "distributed optimizer"])
@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_a_step_whose_gradient_is_not_finite_changes_nothing(results: Path, layout: str, distributed: bool) -> None:
    assert load(results, layout, "qwen3", distributed)["broken_step"] == {"updated": False, "changed": []}


def test_two_steps_move_the_weights_far_more_than_the_tolerance(results: Path, models: Path) -> None:
    """The comparison above would notice a step that did not happen."""
    found = load(results, "one", "qwen3", False)["weights"]
    before = transformers.AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float32).state_dict()
    assert min(relative(found[name], before[name]) for name in found) > 20 * TOLERANCE
