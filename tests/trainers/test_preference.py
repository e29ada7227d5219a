"""Preference optimisation has the loss and gradient of autograd in transformers, the same in every layout."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.launch import torchrun
from tests.trainers.tiny_pairs import make_tiny_pairs
from tests.trainers.tiny_run import read_metrics

TOLERANCE = 1e-5
BETA = 0.3

TP, PP, VPP, CP = (
    f"parallel.{name}_parallel_size=2"
    for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
)
LAYOUTS: dict[int, dict[str, list[str]]] = {
    1: {"one": [], "small micro-batches": ["actor.max_tokens_per_micro_batch=128"]},
    2: {"TP2": [TP], "PP2": [PP], "CP2": [CP], "DP2": [], "PP2 VPP2": [PP, VPP]},
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts if name != "one"]
LOSSES = ("dpo", "ipo", "kto")
ANSWERS = 32
"""Responses of all pairs."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a loss: two steps on all pairs in every layout."""

    @functools.cache
    def make(loss: str) -> Path:
        folder = tmp_path_factory.mktemp(loss)
        config = make_tiny_pairs(
            folder,
            data={"train_batch_size": ANSWERS if loss == "kto" else ANSWERS // 2},
            actor={"max_tokens_per_micro_batch": 256},
            trainer={"kind": "preference"},
            preference={"loss_type": loss, "beta": BETA},
        )
        for ranks, layouts in LAYOUTS.items():
            torchrun(ranks, "tests/trainers/train_in_layouts.py", config, folder, json.dumps(layouts), timeout=280)
        return folder

    return make


class Policy:
    """A model of transformers, and the sum of its log-probs of each response, from texts, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    def ids(self, messages: list[dict[str, str]], *, prompt: bool) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True)["input_ids"]

    def parts(self, prompt: str, answer: str) -> tuple[list[int], list[int], int]:
        """(tokens of the prompt, tokens behind it, how many of these are the response with its end token)."""
        question = [{"role": "user", "content": prompt}]
        whole = self.ids([*question, {"role": "assistant", "content": answer}], prompt=False)
        start = self.ids(question, prompt=True)
        assert whole[: len(start)] == start
        rest = whole[len(start) :]
        return start, rest, rest.index(self.tokenizer.eos_token_id) + 1

    def logprob(self, start: list[int], rest: list[int], count: int) -> torch.Tensor:
        ids = torch.tensor([*start, *rest])
        logits = self.model(ids.unsqueeze(0)).logits[0].log_softmax(-1)
        return logits[len(start) - 1 :].gather(1, ids[len(start) :].unsqueeze(1))[:count].sum()


def rows_of(folder: Path, name: str = "train") -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def of_answers(policy: Policy, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """([pairs, 2] log-probs, [pairs, 2] lengths) of the chosen and rejected answers."""
    parts = [policy.parts(row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected")]
    logprobs = torch.stack([policy.logprob(*each) for each in parts]).view(-1, 2)
    return logprobs, torch.tensor([count for *_, count in parts]).view(-1, 2)


def mismatched(policy: Policy, rows: list[dict[str, Any]]) -> torch.Tensor:
    """[pairs, 2] log-probs of each answer of a pair's neighbour behind its own prompt; both rows of a pair get the
    chosen one, which is the first answer to another prompt."""
    sums = []
    for row, following in zip(rows, [*rows[1:], rows[0]], strict=True):
        start, _, _ = policy.parts(row["prompt"], row["chosen"])
        _, rest, count = policy.parts(following["prompt"], following["chosen"])
        sums += [policy.logprob(start, rest, count)] * 2
    return torch.stack(sums).view(-1, 2)


def expected_loss(loss: str, policy: Policy, reference: Policy, rows: list[dict[str, Any]]) -> torch.Tensor:
    logprobs, lengths = of_answers(policy, rows)
    with torch.no_grad():
        ratios_of = of_answers(reference, rows)[0]
    ratios = logprobs - ratios_of
    if loss == "dpo":
        return -torch.log(torch.sigmoid(BETA * (ratios[:, 0] - ratios[:, 1]))).mean()
    if loss == "ipo":
        means = ratios / lengths
        return (means[:, 0] - means[:, 1] - 1 / (2 * BETA)).square().mean()
    with torch.no_grad():
        kl = (mismatched(policy, rows) - mismatched(reference, rows)).mean().clamp(min=0)
    chosen, rejected = 1 - torch.sigmoid(BETA * (ratios[:, 0] - kl)), 1 - torch.sigmoid(BETA * (kl - ratios[:, 1]))
    return torch.cat([chosen, rejected]).mean()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_first_step_has_the_loss_and_gradient_of_autograd_in_transformers(
    folder_of: Callable[[str], Path], loss: str
) -> None:
    folder = folder_of(loss)
    policy, reference = Policy(folder / "model"), Policy(folder / "model")
    value = expected_loss(loss, policy, reference, rows_of(folder))
    value.backward()
    grads = [parameter.grad for parameter in policy.model.parameters() if parameter.grad is not None]
    first = read_metrics(folder / "one")[0]
    assert first["train/loss"] == pytest.approx(value.item(), rel=TOLERANCE)
    assert first["train/grad_norm"] == pytest.approx(
        torch.stack([grad.norm() for grad in grads]).norm().item(), rel=1e-4
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_the_exported_model_has_the_held_out_loss_in_transformers(folder_of: Callable[[str], Path], loss: str) -> None:
    """Policy and reference are far apart now, so that KTO's divergence counts."""
    folder = folder_of(loss)
    policy, reference = Policy(folder / "one" / "hf"), Policy(folder / "model")
    rows = rows_of(folder, "val")
    with torch.no_grad():
        value = expected_loss(loss, policy, reference, rows)
        ratios = BETA * (of_answers(policy, rows)[0] - of_answers(reference, rows)[0])
    last = read_metrics(folder / "one")[-1]
    assert last["val/loss"] == pytest.approx(value.item(), rel=1e-4)
    assert last["val/rewards/chosen"] == pytest.approx(ratios[:, 0].mean().item(), rel=1e-4)
    assert last["val/rewards/rejected"] == pytest.approx(ratios[:, 1].mean().item(), rel=1e-4)
    assert last["val/logps/chosen"] == pytest.approx(of_answers(policy, rows)[0][:, 0].mean().item(), rel=1e-4)
    if loss == "kto":
        assert last["val/kl"] > 0.1
    else:
        assert last["val/rewards/margins"] == pytest.approx((ratios[:, 0] - ratios[:, 1]).mean().item(), rel=1e-4)
        assert last["val/rewards/accuracies"] == (ratios[:, 0] > ratios[:, 1]).float().mean().item()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_gives_the_same_weights(folder_of: Callable[[str], Path], loss: str, layout: str) -> None:
    folder = folder_of(loss)
    expected, found = (load_file(folder / name / "hf" / "model.safetensors") for name in ("one", layout))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() < TOLERANCE * tensor.norm(), name


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_gives_the_same_metrics(folder_of: Callable[[str], Path], loss: str, layout: str) -> None:
    folder = folder_of(loss)
    for expected, found in zip(read_metrics(folder / "one"), read_metrics(folder / layout), strict=True):
        names = {name for name in expected if not name.startswith(("timing_s/", "perf/", "batch/"))}
        assert names <= found.keys()
        if expected["step"] == 1:
            # Policy and reference are one: rounding decides which of two equal rewards is larger.
            names.remove("train/rewards/accuracies")
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("loss", LOSSES)
def test_the_steps_moved_the_weights_far_more_than_the_tolerance(folder_of: Callable[[str], Path], loss: str) -> None:
    folder = folder_of(loss)
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(folder / "one" / "hf" / "model.safetensors")
    assert min(((after[name] - tensor).norm() / tensor.norm()).item() for name, tensor in before.items()) > 1e-4


def test_at_the_first_step_policy_and_reference_are_one(folder_of: Callable[[str], Path]) -> None:
    first = read_metrics(folder_of("dpo") / "one")[0]
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["train/rewards/margins"] == pytest.approx(0, abs=1e-4)
