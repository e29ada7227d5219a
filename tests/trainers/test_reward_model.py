"""Reward models learn the loss of their papers, the same in every layout, and leave as transformers' classifiers."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.launch import torchrun
from tests.trainers.tiny_pairs import make_tiny_pairs, make_tiny_reward_model
from tests.trainers.tiny_run import read_metrics

TOLERANCE = 1e-5
CENTERING, REGRESSION = 0.05, 0.3

TP, PP, VPP, CP = (
    f"parallel.{name}_parallel_size=2"
    for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
)
LAYOUTS: dict[int, dict[str, list[str]]] = {
    1: {"one": [], "small micro-batches": ["actor.max_tokens_per_micro_batch=128"]},
    2: {"TP2": [TP], "PP2": [PP], "CP2": [CP], "DP2": [], "PP2 VPP2": [PP, VPP]},
    4: {"TP2 PP2": [TP, PP], "CP2 DP2": [CP]},
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts if name != "one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on all pairs, with every term of the loss, in every layout."""
    folder = tmp_path_factory.mktemp("reward")
    config = make_tiny_pairs(
        folder,
        data={"train_batch_size": 16},
        actor={"max_tokens_per_micro_batch": 256},
        reward_model={
            "centering_coef": CENTERING,
            "teacher": str(make_tiny_reward_model(folder / "teacher", "llama", num_hidden_layers=8, seed=3)),
            "regression_weight": REGRESSION,
        },
    )
    make_tiny_reward_model(folder / "model", "qwen3")
    for ranks, layouts in LAYOUTS.items():
        torchrun(ranks, "tests/trainers/train_in_layouts.py", config, folder, json.dumps(layouts), timeout=280)
    return folder


def scores_of(model_folder: Path, data: Path, *, train: bool = False) -> torch.Tensor:
    """[pairs, 2] by transformers, from text to score, one padded batch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        model_folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.config.pad_token_id = tokenizer.eos_token_id
    texts = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        for row in pq.read_table(data).to_pylist()
        for side in ("chosen", "rejected")
    ]
    ids = [tokenizer.apply_chat_template(text, return_dict=True)["input_ids"] for text in texts]
    length = max(map(len, ids))
    padded = torch.tensor([row + [tokenizer.eos_token_id] * (length - len(row)) for row in ids])
    attended = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in ids])
    with torch.set_grad_enabled(train):
        scores = model(padded, attention_mask=attended).logits.view(-1, 2)
    if train:
        scores.model = model  # type: ignore[attr-defined]
    return scores


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_first_step_has_the_loss_and_gradient_of_autograd_in_transformers(folder: Path) -> None:
    scores = scores_of(folder / "model", folder / "train.parquet", train=True)
    teacher = scores_of(folder / "teacher", folder / "train.parquet")
    margins = torch.tensor([row["margin"] for row in pq.read_table(folder / "train.parquet").to_pylist()])
    chosen, rejected = scores.unbind(1)
    loss = (
        -torch.log(torch.sigmoid(chosen - rejected - margins))
        + CENTERING * (chosen + rejected) ** 2
        + REGRESSION * ((chosen - teacher[:, 0]) ** 2 + (rejected - teacher[:, 1]) ** 2) / 2
    ).mean()
    loss.backward()
    grads = [parameter.grad for parameter in scores.model.parameters() if parameter.grad is not None]
    first = read_metrics(folder / "one")[0]
    assert first["train/loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
    assert first["train/grad_norm"] == pytest.approx(
        torch.stack([grad.norm() for grad in grads]).norm().item(), rel=1e-4
    )


@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_gives_the_same_metrics(folder: Path, layout: str) -> None:
    for expected, found in zip(read_metrics(folder / "one"), read_metrics(folder / layout), strict=True):
        names = {name for name in expected if not name.startswith(("timing_s/", "perf/", "batch/"))}
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_gives_the_same_weights(folder: Path, layout: str) -> None:
    expected, found = (load_file(folder / name / "hf" / "model.safetensors") for name in ("one", layout))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() < TOLERANCE * tensor.norm(), name


def test_the_steps_moved_the_weights_far_more_than_the_tolerance(folder: Path) -> None:
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(folder / "one" / "hf" / "model.safetensors")
    assert min(((after[name] - tensor).norm() / tensor.norm()).item() for name, tensor in before.items()) > 1e-4


@pytest.mark.parametrize("layout", ["one", "TP2 PP2"])
def test_held_out_metrics_are_those_of_the_exported_model_in_transformers(folder: Path, layout: str) -> None:
    scores = scores_of(folder / layout / "hf", folder / "val.parquet")
    teacher = scores_of(folder / "teacher", folder / "val.parquet")
    found = read_metrics(folder / layout)[-1]
    gaps, teacher_gaps = ((each[:, 0] - each[:, 1]).tolist() for each in (scores, teacher))
    pairs = list(zip(gaps, teacher_gaps, strict=True))
    expected = {
        "val/accuracy": sum(gap > 0 for gap in gaps) / len(gaps),
        "val/margin": sum(gaps) / len(gaps),
        "val/chosen_score": scores[:, 0].mean().item(),
        "val/rejected_score": scores[:, 1].mean().item(),
        "val/regression": (scores - teacher).square().mean().item(),
        "val/agreement_with_teacher": sum((gap > 0) == (other > 0) for gap, other in pairs) / len(pairs),
        "val/kl_to_teacher": sum(
            sigmoid(t) * math.log(sigmoid(t) / sigmoid(s)) + sigmoid(-t) * math.log(sigmoid(-t) / sigmoid(-s))
            for s, t in pairs
        )
        / len(pairs),
        "val/kendall_tau_with_teacher": concordance(scores.flatten().tolist(), teacher.flatten().tolist()),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def concordance(a: list[float], b: list[float]) -> float:
    """(concordant − discordant) ÷ pairs, where nothing is tied."""
    signs = [(a[i] - a[j]) * (b[i] - b[j]) > 0 for i, j in itertools.combinations(range(len(a)), 2)]
    return (2 * sum(signs) - len(signs)) / len(signs)


@pytest.mark.parametrize("layout", ["one", "TP2 PP2", "CP2 DP2"])
def test_the_teachers_scores_that_are_kept_are_transformers(folder: Path, layout: str) -> None:
    for name in ("train", "val"):
        kept = load_file(folder / layout / f"teacher-scores-{name}.safetensors")["numbers"]
        assert torch.allclose(kept, scores_of(folder / "teacher", folder / f"{name}.parquet"), atol=1e-4)
