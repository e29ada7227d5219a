"""What the plan says a rank holds is what Megatron's real models hold: weights, gradients, optimizer, activations."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.config.layout import Layout
from megarl.planning.activations import CPU, PassSettings, Recompute, chunk_activations
from megarl.planning.architecture import Architecture, Head
from megarl.planning.memory import gradient_bytes, optimizer_bytes
from megarl.planning.parameters import stage_chunks, stage_parameters
from megarl.planning.schedule import peak_in_flight
from tests.launch import torchrun
from tests.tiny_models import hf_config

# The first test waits for all of them to be built.

STATE_TOLERANCE = 0.01
ACTIVATION_TOLERANCE = 0.15
HEADS = {"causal_lm": Head.LOGITS, "critic": Head.VALUE, "reward": Head.SCORE}

WIDER = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 1002}
"""Wide enough for the terms that grow with the width to be the large ones, as in real models."""


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    ranks: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    role: str = "causal_lm"
    dtype: str = "float32"
    recompute: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 2
    distributed_optimizer: bool = True
    sequences: int = 4
    sequence_tokens: int = 64

    @property
    def name(self) -> str:
        sizes = " ".join(f"{key}={value}" for key, value in self.layout.items()) or "one"
        options = [self.role, self.dtype, *map(str, self.recompute.values()), str(self.micro_batches)]
        return f"{self.ranks}: {self.model}, {sizes}, {' '.join(options)}, {self.distributed_optimizer}"

    @property
    def whole_layout(self) -> Layout:
        return Layout(world_size=self.ranks, **self.layout)

    def as_json(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in (*self.__dataclass_fields__, "name")}


FAMILIES = ("llama_tied", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3")
FULL = {"recompute_granularity": "full"}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
PAIRS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
SELECTIVE = {"recompute_granularity": "selective"}

CASES = [
    *(Case(model=model) for model in FAMILIES),
    *(Case(model=model, dtype="bfloat16") for model in ("qwen3", "qwen2_moe", "deepseek_v3")),
    *(
        Case(model=m, recompute=r)
        for m, r in itertools.product(("llama", "qwen3_moe", "deepseek_v3"), (FULL, SELECTIVE))
    ),
    *(Case(model="qwen2", recompute=r) for r in (BLOCK, PAIRS)),
    *(Case(model="llama", role=role) for role in ("critic", "reward")),
    *(Case(model=m, ranks=2, layout={"tp": 2}) for m in ("llama", "qwen2_moe", "deepseek_v3")),
    Case(model="llama", ranks=2, layout={"tp": 2, "sequence_parallel": False}),
    *(Case(model=m, ranks=2, layout={"pp": 2}, micro_batches=4) for m in ("llama_tied", "glm4_moe")),
    Case(model="qwen3", ranks=2, layout={"pp": 2, "vpp": 2}, micro_batches=6),
    Case(model="qwen3", ranks=2, layout={"cp": 2}),
    *(Case(model=m, ranks=2, layout={"ep": 2}) for m in ("qwen3_moe", "deepseek_v3")),
    *(Case(model="qwen2", ranks=2, dtype="bfloat16", distributed_optimizer=d) for d in (True, False)),
    Case(model="qwen2", ranks=4, layout={"tp": 4}),
    Case(model="qwen3_moe", ranks=4, layout={"tp": 2, "ep": 2, "etp": 1}),
    Case(
        model="deepseek_v3",
        ranks=4,
        layout={"tp": 2, "pp": 2, "ep": 2, "etp": 1, "first_stage_layers": 1, "last_stage_layers": 3},
        micro_batches=3,
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in {case.model for case in CASES}:
        config = hf_config(name)
        for key, value in WIDER.items():
            setattr(config, key, value)
        config.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def measured(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """What each rank reports, by case."""
    folder, found = tmp_path_factory.mktemp("results"), {}
    for ranks in sorted({case.ranks for case in CASES}):
        cases = [case.as_json() for case in CASES if case.ranks == ranks]
        cases.sort(key=lambda case: json.dumps(case["layout"]))
        file = folder / f"{ranks}.json"
        torchrun(ranks, "tests/planning/ranks.py", models, file, json.dumps(cases), timeout=280)
        found |= json.loads(file.read_text())
    return found


by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_case
def test_every_rank_holds_exactly_the_weights_of_the_plan(measured: dict, models: Path, case: Case) -> None:
    architecture = Architecture.from_hf(models / case.model)
    for rank in measured[case.name]:
        expected = stage_parameters(architecture, case.whole_layout, rank["stage"], HEADS[case.role])
        assert rank["parameters"] == expected.total


@by_case
def test_gradients_and_optimizer_take_what_the_plan_says(measured: dict, models: Path, case: Case) -> None:
    architecture, layout = Architecture.from_hf(models / case.model), case.whole_layout
    element = 2 if case.dtype == "bfloat16" else 4
    for rank in measured[case.name]:
        held = stage_parameters(architecture, layout, rank["stage"], HEADS[case.role])
        assert rank["gradient_bytes"] == pytest.approx(gradient_bytes(held), rel=STATE_TOLERANCE)
        expected = optimizer_bytes(held, layout, element, distributed=case.distributed_optimizer)
        assert rank["optimizer_bytes"] == pytest.approx(expected, rel=STATE_TOLERANCE)


def expected_activations(architecture: Architecture, case: Case, stage: int) -> float:
    layout = case.whole_layout
    recompute = {key.removeprefix("recompute_"): value for key, value in case.recompute.items()}
    settings = PassSettings(
        tokens=case.sequences * case.sequence_tokens // layout.cp,
        sequence_tokens=case.sequence_tokens,
        predicted=case.sequences * (case.sequence_tokens - 1) // layout.cp,
        element_bytes=2 if case.dtype == "bfloat16" else 4,
        kernels=CPU,
        recompute=Recompute(**recompute),
    )
    chunks = [
        chunk_activations(architecture, layout, chunk, HEADS[case.role], settings)
        for chunk in stage_chunks(layout, architecture.shape.num_layers, stage)
    ]
    return peak_in_flight(layout, stage, case.micro_batches, chunks)


@by_case
def test_activations_are_what_autograd_keeps(measured: dict, models: Path, case: Case) -> None:
    architecture = Architecture.from_hf(models / case.model)
    stages: dict[int, list[int]] = {}
    for rank in measured[case.name]:
        assert rank["left_over"] == 0
        stages.setdefault(rank["stage"], []).append(rank["activation_bytes"])
    for stage, of_ranks in stages.items():
        # Ranks with other experts get other tokens; the plan knows the mean.
        mean = sum(of_ranks) / len(of_ranks)
        assert mean == pytest.approx(expected_activations(architecture, case, stage), rel=ACTIVATION_TOLERANCE)
