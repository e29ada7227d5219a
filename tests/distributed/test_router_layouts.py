"""Replayed experts and the losses of routers: gradients equal autograd of transformers, in every layout and packing."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.distributed.layout_proof import (
    TOLERANCE,
    checkpoint_gradients,
    load,
    train_in_layouts,
    transformers_loss,
    transformers_model,
    worst,
)
from tests.distributed.train_step import LENGTHS, experts_to_replay
from tests.tiny_models import make_hf_model

FAMILIES = ("qwen3_moe", "deepseek_v3")
AUX_LOSS, Z_LOSS = 0.5, 0.1
"""Large, so that each moves the gradient far more than the tolerance."""
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "one recompute full": {}, "one, three to a pack": {}},
    2: {"EP2": {"ep": 2}, "TP2 ETP1": {"tp": 2, "etp": 1}, "PP2 VPP2": {"pp": 2, "vpp": 2}, "CP2": {"cp": 2}},
    4: {"TP2 EP2": {"tp": 2, "ep": 2}, "PP2 EP2 recompute full": {"pp": 2, "ep": 2}, "TP2 CP2": {"tp": 2, "cp": 2}},
}
ALL_LAYOUTS = [name for layouts in LAYOUTS.values() for name in layouts]
EVERY_RUN = [(layout, family) for layout in ALL_LAYOUTS for family in FAMILIES]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        make_hf_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for ranks, layouts in LAYOUTS.items():
        cases = [
            {
                "name": name,
                "layout": layout,
                "runs": [(family, False) for family in FAMILIES],
                "replay": True,
                "per_micro_batch": 3 if name.endswith("three to a pack") else 2,
                "model_config": {
                    "moe_aux_loss_coeff": AUX_LOSS,
                    "moe_z_loss_coeff": Z_LOSS,
                    "recompute_granularity": "full" if name.endswith("recompute full") else "none",
                },
            }
            for name, layout in layouts.items()
        ]
        train_in_layouts(ranks, cases, models, folder)
    return folder


class Reference:
    """A transformers model whose routers are told what to choose, with the losses written out for each sequence."""

    def __init__(self, folder: Path) -> None:
        model = transformers_model(folder)
        self._config = model.config
        gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self._mixtures, self._experts = len(gates), gates[0].num_experts
        self.aux_loss = self.z_loss = self.entropy = torch.zeros(())
        self.biases = [gate.e_score_correction_bias.clone() for gate in gates if model.config.model_type != "qwen3_moe"]
        self.agreeing = self.compared = 0
        self.loads = torch.zeros(self._mixtures, self._experts)
        for mixture, gate in enumerate(gates):
            gate.register_forward_hook(functools.partial(self._replay, mixture, iter(LENGTHS)))
        self.plain_loss = transformers_loss(model)
        (self.plain_loss + AUX_LOSS * self.aux_loss + Z_LOSS * self.z_loss).backward()
        self.gradients = checkpoint_gradients(model)

    def _replay(self, mixture: int, lengths: Any, gate: Any, inputs: Any, output: Any) -> Any:
        logits, _, own = output
        length = next(lengths)
        self._add_losses(logits)
        # The program makes them for every layer, of which the first may be dense.
        wanted = experts_to_replay(length, self._config.num_hidden_layers, self._experts, own.shape[1])
        wanted = wanted[:, mixture].long()
        given = wanted[:, 0] >= 0
        chosen = torch.where(given[:, None], wanted, own)
        self.compared += int(given.sum())
        self.agreeing += sum(set(a) == set(b) for a, b in zip(own[given].tolist(), wanted[given].tolist(), strict=True))
        self.loads[mixture] += chosen.flatten().bincount(minlength=self._experts)
        return logits, self._weights(logits, chosen), chosen

    def _weights(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        if self._config.model_type == "qwen3_moe":
            weights = logits.softmax(dim=-1).gather(1, chosen)
            return weights / weights.sum(dim=1, keepdim=True)
        weights = logits.sigmoid().gather(1, chosen)
        return self._config.routed_scaling_factor * weights / weights.sum(dim=1, keepdim=True)

    def _add_losses(self, logits: torch.Tensor) -> None:
        """arXiv:2412.19437, equations 17 to 20, and arXiv:2202.08906, of one sequence and layer."""
        tokens, topk = logits.shape[0], self._config.num_experts_per_tok
        scores = logits.softmax(dim=-1) if self._config.model_type == "qwen3_moe" else logits.sigmoid()
        scores = scores / scores.sum(dim=1, keepdim=True)
        counts = functional.one_hot(scores.topk(topk).indices, self._experts).sum(dim=(0, 1))
        balance = (counts * self._experts / (topk * tokens) * scores.mean(dim=0)).sum()
        self.aux_loss = self.aux_loss + balance / len(LENGTHS)
        self.entropy = self.entropy - (scores * scores.log()).sum().detach() / sum(LENGTHS)
        self.z_loss = self.z_loss + logits.logsumexp(dim=-1).square().sum() / sum(LENGTHS)

    def metrics(self) -> dict[str, float]:
        over_mean = self.loads.max(dim=1).values / self.loads.mean(dim=1)
        found = {
            "router/entropy": self.entropy.item() / self._mixtures,
            "router/agreement": self.agreeing / self.compared,
            "router/aux_loss": self.aux_loss.item() / self._mixtures,
            "router/z_loss": self.z_loss.item() / self._mixtures,
            "router/load_max_over_mean/mean": over_mean.mean().item(),
            "router/load_max_over_mean/max": over_mean.max().item(),
            "router/idle_experts": 0.0,
        }
        if self.biases:
            biases = torch.cat(self.biases)
            found["router/expert_bias/max"] = biases.abs().max().item()
            found["router/expert_bias/rms"] = biases.square().mean().sqrt().item()
        return found


@pytest.fixture(scope="module")
def reference(models: Path) -> Any:
    return functools.cache(lambda family: Reference(models / family))


@pytest.mark.parametrize(("layout", "family"), EVERY_RUN)
def test_gradients_equal_autograd_of_transformers(results: Path, reference: Any, layout: str, family: str) -> None:
    expected, found = reference(family), load(results, layout, family, False)
    assert found["losses"][0] == pytest.approx(expected.plain_loss.item(), rel=TOLERANCE)
    distance, name = worst(found["grads"], expected.gradients)
    assert distance < TOLERANCE, name


@pytest.mark.parametrize(("layout", "family"), EVERY_RUN)
def test_a_step_and_its_metrics_are_the_same_in_every_layout(results: Path, layout: str, family: str) -> None:
    expected, found = load(results, "one", family, False), load(results, layout, family, False)
    for ours, theirs in zip(found["routers"], expected["routers"], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    distance, name = worst(found["weights"], expected["weights"])
    assert distance < TOLERANCE, name


@pytest.mark.parametrize("family", FAMILIES)
def test_metrics_are_what_plain_counting_finds(results: Path, reference: Any, family: str) -> None:
    found = load(results, "one", family, False)["routers"][0]
    expected = reference(family).metrics()
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert 0 < expected["router/agreement"] < 1
