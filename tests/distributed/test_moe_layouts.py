"""Mixtures of experts: gradients equal transformers' autograd, and steps are the same in every layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

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
from tests.tiny_models import MOE, make_hf_model

BIAS_RATE = 1e-3
WITH_EXPERT_BIAS = ("glm4_moe", "deepseek_v3")
TWO_FAMILIES = ("qwen3_moe", "deepseek_v3")
"""Those that are trained in every layout, and with the distributed optimizer too: between them they have all that
differs; the others are trained where experts, or the layers before and after them, are cut."""

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "one recompute full": {}},
    2: {
        "EP2": {"ep": 2},
        "TP2": {"tp": 2},  # experts are cut as well: ETP2
        "TP2 ETP1": {"tp": 2, "etp": 1},
        "TP2 EP2 ETP1": {"tp": 2, "ep": 2, "etp": 1},
        "PP2": {"pp": 2},
        "PP2 VPP2": {"pp": 2, "vpp": 2},
        "CP2": {"cp": 2},
        "DP2": {},
    },
    4: {
        "TP2 PP2": {"tp": 2, "pp": 2},
        "TP2 EP2": {"tp": 2, "ep": 2},
        "PP2 EP2": {"pp": 2, "ep": 2},
        "PP2 EP2 recompute full": {"pp": 2, "ep": 2},
        "EP4": {"ep": 4},
        "CP2 EP2": {"cp": 2, "ep": 2},
    },
    8: {"TP2 PP2 EP2": {"tp": 2, "pp": 2, "ep": 2}, "PP2 CP2 EP2": {"pp": 2, "cp": 2, "ep": 2}},
}
OF_ALL_FAMILIES = ("one", "EP2", "TP2", "TP2 ETP1", "TP2 EP2", "PP2 EP2")

RUNS = {
    layout: [
        *((model, False) for model in (MOE if layout in OF_ALL_FAMILIES else TWO_FAMILIES)),
        *((model, True) for model in TWO_FAMILIES),
    ]
    for layouts in LAYOUTS.values()
    for layout in layouts
}
EVERY_RUN = [(layout, model, distributed) for layout, runs in RUNS.items() for model, distributed in runs]
PLAIN_RUNS = [(layout, model) for layout, model, distributed in EVERY_RUN if not distributed]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in MOE:
        make_hf_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for ranks, layouts in LAYOUTS.items():
        cases = [
            {"name": name, "layout": layout, "runs": RUNS[name], "model_config": _model_config(name)}
            for name, layout in layouts.items()
        ]
        train_in_layouts(ranks, cases, models, folder)
    still = {"name": "biases left alone", "layout": {}, "runs": [(model, False) for model in WITH_EXPERT_BIAS]}
    bf16 = {"name": "bfloat16", "runs": [(model, False) for model in MOE], "layout": {}}
    train_in_layouts(1, [still, {**bf16, "model_config": {"dtype": "bfloat16"}}], models, folder)
    return folder


def _model_config(layout: str) -> dict[str, Any]:
    recompute = {"recompute_granularity": "full"} if layout.endswith("recompute full") else {}
    return {"moe_router_bias_update_rate": BIAS_RATE, **recompute}


class Reference:
    """Loss, gradients and the experts of each token as transformers computes them."""

    def __init__(self, folder: Path) -> None:
        model = transformers_model(folder)
        chosen: dict[str, list[torch.Tensor]] = {}
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                keep = chosen.setdefault(name, [])
                module.register_forward_hook(lambda module, inputs, output, keep=keep: keep.append(output[2]))
        loss = transformers_loss(model)
        loss.backward()
        self.loss = loss.item()
        self.gradients = checkpoint_gradients(model)
        experts = next(m.num_experts for n, m in model.named_modules() if n.endswith("mlp.gate"))
        self.tokens_per_expert = {
            name: torch.cat([indices.flatten() for indices in parts]).bincount(minlength=experts)
            for name, parts in chosen.items()
        }


@pytest.fixture(scope="module")
def reference(models: Path) -> Any:
    return functools.cache(lambda model: Reference(models / model))


@pytest.mark.parametrize(("layout", "model"), PLAIN_RUNS)
def test_gradients_equal_autograd_of_transformers(results: Path, reference: Any, layout: str, model: str) -> None:
    expected, found = reference(model), load(results, layout, model, False)
    assert found["losses"][0] == pytest.approx(expected.loss, rel=TOLERANCE)
    norm = torch.stack([grad.norm() for grad in expected.gradients.values()]).norm().item()
    assert found["grad_norms"][0] == pytest.approx(norm, rel=TOLERANCE)
    # The key projection's bias moves all scores of a query alike, so its gradient is 0 but for rounding,
    # except in glm4_moe, whose keys are normalised.
    leave_out = "k_proj.bias" if model == "qwen2_moe" else "\0"
    distance, name = worst(found["grads"], expected.gradients, leave_out=leave_out)
    assert distance < TOLERANCE, name


@pytest.mark.parametrize(("layout", "model", "distributed"), EVERY_RUN)
def test_a_step_is_the_same_in_every_layout(results: Path, layout: str, model: str, distributed: bool) -> None:
    expected, found = load(results, "one", model, False), load(results, layout, model, distributed)
    assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=TOLERANCE)
    distance, name = worst(found["weights"], expected["weights"])
    assert distance < TOLERANCE, name


@pytest.mark.parametrize("model", MOE)
def test_gradients_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(
    results: Path, models: Path, reference: Any, model: str
) -> None:
    in_bfloat16 = transformers_model(models / model, torch.bfloat16)
    transformers_loss(in_bfloat16).backward()
    theirs, exact = _flat(checkpoint_gradients(in_bfloat16)), _flat(reference(model).gradients)
    ours = _flat(load(results, "bfloat16", model, False)["grads"])
    assert relative(ours, exact) < 1.25 * relative(theirs, exact)


def _flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].float().flatten() for name in sorted(gradients)])


@pytest.mark.parametrize("model", MOE)
def test_two_steps_move_every_weight_far_more_than_the_tolerance(results: Path, models: Path, model: str) -> None:
    """The comparison above would notice a step that did not happen, or an expert that was left out."""
    found = load(results, "one", model, False)["weights"]
    before = load_file(models / model / "model.safetensors")
    assert min(relative(found[name], tensor) for name, tensor in before.items()) > 20 * TOLERANCE


@pytest.mark.parametrize(("layout", "model"), [run for run in PLAIN_RUNS if run[1] in WITH_EXPERT_BIAS])
def test_expert_biases_follow_the_real_tokens_that_each_expert_had(
    results: Path, models: Path, reference: Any, layout: str, model: str
) -> None:
    """arXiv:2408.15664, algorithm 1. The program's packs are more than half padding."""
    before = load_file(models / model / "model.safetensors")
    first, second = load(results, layout, model, False)["expert_biases"]
    counts = reference(model).tokens_per_expert
    assert len(first) == len(counts) == 3
    for gate, tokens in counts.items():
        name = f"{gate}.e_score_correction_bias"
        expected = before[name] + BIAS_RATE * (tokens.float().mean() - tokens).sign()
        torch.testing.assert_close(first[name], expected, rtol=0, atol=1e-7)
        assert torch.equal(second[name], load(results, "one", model, False)["expert_biases"][1][name])


@pytest.mark.parametrize("model", WITH_EXPERT_BIAS)
def test_expert_biases_stay_where_the_rate_is_left_at_its_default(results: Path, models: Path, model: str) -> None:
    before = load_file(models / model / "model.safetensors")
    for biases in load(results, "biases left alone", model, False)["expert_biases"]:
        assert biases and all(torch.equal(bias, before[name]) for name, bias in biases.items())


@pytest.mark.parametrize(("layout", "model", "distributed"), EVERY_RUN)
def test_a_step_whose_gradient_is_not_finite_changes_nothing(
    results: Path, layout: str, model: str, distributed: bool
) -> None:
    assert load(results, layout, model, distributed)["broken_step"] == {"updated": False, "changed": []}
