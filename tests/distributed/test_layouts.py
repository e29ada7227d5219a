"""The layout never changes the mathematics: loss, gradient and weights agree between layouts and with autograd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.distributed.train_step import global_batch
from tests.launch import torchrun
from tests.tiny_models import make_hf_model

MODELS = ("llama", "qwen2", "qwen2_tied", "qwen3")
TOLERANCE = 1e-5

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
LAYOUTS_A_PROCESS = 3
"""Groups of a layout that is gone keep their gloo threads."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make_hf_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for ranks, layouts in LAYOUTS.items():
        cases = [
            {"name": name, "layout": layout, "models": MODELS, "recompute": name.split("recompute ")[-1]}
            if "recompute" in name
            else {"name": name, "layout": layout, "models": MODELS}
            for name, layout in layouts.items()
        ]
        for start in range(0, len(cases), LAYOUTS_A_PROCESS):
            part = json.dumps(cases[start : start + LAYOUTS_A_PROCESS])
            torchrun(ranks, "tests/distributed/train_step.py", models, folder, part, timeout=280)
    return folder


def load(results: Path, layout: str, model: str, distributed: bool) -> dict:
    return torch.load(results / f"{layout}-{model}-{distributed}.pt")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 distance over L2 norm."""
    return ((found - expected).norm() / expected.norm()).item()


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    return max((relative(found[name], tensor), name) for name, tensor in expected.items())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_one_process_gradients_equal_autograd_of_transformers(results: Path, models: Path, model: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        models / model, dtype=torch.float32, attn_implementation="eager"
    )
    sequences = global_batch(reference.config.vocab_size)
    total = sum(len(sequence) - 1 for sequence in sequences)
    loss = torch.zeros(())
    for sequence in sequences:
        logprobs = reference(sequence[None]).logits[0, :-1].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss = loss - (logprobs.gather(1, sequence[1:, None])[:, 0] + 0.1 * entropy).sum() / total
    loss.backward()
    found = load(results, "one", model, False)
    assert found["losses"][0] == pytest.approx(loss.item(), rel=TOLERANCE)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    # The key projection's bias moves all scores of a query alike, so its gradient is 0 but for rounding.
    rounding_only = {name for name in expected if name.endswith("k_proj.bias")}
    found_grads = {name: grad for name, grad in found["grads"].items() if name not in rounding_only}
    distance, name = worst(found_grads, {name: grad for name, grad in expected.items() if name not in rounding_only})
    assert distance < TOLERANCE, name
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm().item()
    assert found["grad_norms"][0] == pytest.approx(norm, rel=TOLERANCE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("distributed", [False, True], ids=["optimizer", "distributed optimizer"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_a_step_is_the_same_in_every_layout(results: Path, layout: str, model: str, distributed: bool) -> None:
    expected, found = load(results, "one", model, False), load(results, layout, model, distributed)
    assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=TOLERANCE)
    distance, name = worst(found["weights"], expected["weights"])
    assert distance < TOLERANCE, name


def test_two_steps_move_the_weights_far_more_than_the_tolerance(results: Path, models: Path) -> None:
    """The comparison above would notice a step that did not happen."""
    found = load(results, "one", "qwen3", False)["weights"]
    before = transformers.AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float32).state_dict()
    assert min(relative(found[name], before[name]) for name in found) > 20 * TOLERANCE
