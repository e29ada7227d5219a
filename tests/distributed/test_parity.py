"""Models load from Hugging Face, compute what transformers computes, and go back bit for bit, in any layout."""

from __future__ import annotations

import json

import pytest
import transformers

from tests.launch import torchrun
from tests.tiny_models import DENSE, MOE, make_hf_model

TOLERANCE = 1e-4
ALL = (*DENSE, *MOE)
# Routers and shared experts as other models of a family have them.
VARIANTS = {
    "qwen3_moe with a softmax over all experts": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen2_moe with a softmax over the chosen experts": ("qwen2_moe", {"norm_topk_prob": True}),
    "glm4_moe with two shared experts": ("glm4_moe", {"n_shared_experts": 2}),
}
CRITICS, REWARDS = ("qwen2_critic", "llama_critic"), ("qwen3_reward",)

# One torchrun for each list; groups of a layout that is gone keep their gloo threads, so lists are short.
CASES = {
    1: [
        [
            {"name": "one", "layout": {}, "models": [*ALL, *VARIANTS]},
            {"name": "one critic", "layout": {}, "models": CRITICS, "role": "critic"},
            {"name": "one reward", "layout": {}, "models": REWARDS, "role": "reward"},
        ]
    ],
    2: [
        [
            {"name": "TP2", "layout": {"tp": 2}, "models": ALL},
            {"name": "TP2 no SP", "layout": {"tp": 2, "sequence_parallel": False}, "models": DENSE},
            {"name": "TP2 critic", "layout": {"tp": 2}, "models": CRITICS, "role": "critic"},
            {"name": "PP2", "layout": {"pp": 2}, "models": ALL},
        ],
        [
            {"name": "CP2", "layout": {"cp": 2}, "models": ALL},
            {"name": "CP2 critic", "layout": {"cp": 2}, "models": CRITICS, "role": "critic"},
            {"name": "EP2", "layout": {"ep": 2}, "models": MOE},
            {"name": "TP2 ETP1", "layout": {"tp": 2, "etp": 1}, "models": MOE},
        ],
    ],
    4: [
        [
            {"name": "TP4", "layout": {"tp": 4}, "models": ALL},
            {"name": "TP2 PP2 VPP2", "layout": {"tp": 2, "pp": 2, "vpp": 2}, "models": ("llama_tied", "qwen3_moe")},
            {
                "name": "PP3+1",
                "layout": {"pp": 2, "tp": 2, "first_stage_layers": 3, "last_stage_layers": 1},
                "models": ("qwen2_tied", "deepseek_v3"),
            },
            {"name": "TP2 PP2 reward", "layout": {"tp": 2, "pp": 2}, "models": REWARDS, "role": "reward"},
        ]
    ],
}
NAMES = [f"{c['name']} {m}" for parts in CASES.values() for part in parts for c in part for m in c["models"]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("parity")
    for name in ALL:
        make_hf_model(name, folder / name)
    for name, (family, changes) in VARIANTS.items():
        make_hf_model(family, folder / name, **changes)
    for name in CRITICS:
        make_hf_model(
            name.removesuffix("_critic"),
            folder / name,
            auto_class=transformers.AutoModelForTokenClassification,
            num_labels=1,
        )
    for name in REWARDS:
        make_hf_model(
            name.removesuffix("_reward"),
            folder / name,
            auto_class=transformers.AutoModelForSequenceClassification,
            num_labels=1,
        )
    found: dict[str, dict] = {}
    for ranks, parts in CASES.items():
        for index, part in enumerate(parts):
            file = folder / f"results-{ranks}-{index}.json"
            torchrun(ranks, "tests/distributed/parity.py", folder, file, json.dumps(part))
            found |= json.loads(file.read_text())
    return found


@pytest.mark.parametrize("case", NAMES)
def test_outputs_equal_transformers_and_the_export_is_bit_identical(results: dict[str, dict], case: str) -> None:
    assert results[case]["distance"] < TOLERANCE
    assert results[case]["missing"] == []
    assert results[case]["different"] == []
