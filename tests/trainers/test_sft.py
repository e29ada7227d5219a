"""SFT has the loss of its tokens in every layout, stops early, and goes on where it was after a resumption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from tests.launch import torchrun
from tests.trainers.tiny_pairs import WORDS, make_tiny_chat_model
from tests.trainers.tiny_run import read_metrics

PROGRAM = "tests/trainers/train_in_layouts.py"
TOLERANCE = 1e-5
TP, PP, CP = (f"parallel.{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context"))
LAYOUTS: dict[int, dict[str, list[str]]] = {
    1: {"one": [], "small micro-batches": ["actor.max_tokens_per_micro_batch=96"]},
    2: {"CP2": [CP], "DP2": []},
    4: {"TP2 PP2": [TP, PP]},
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts if name != "one"]
STOPPING = [
    "optim.lr=0.3",  # far too high: no step after the first lowers the loss
    "trainer.total_training_steps=8",
    "trainer.test_freq=1",
    "trainer.val_before_train=true",
    "trainer.early_stopping_patience=2",
    "trainer.save_freq=1000",
]


def conversations(count: int, offset: int) -> list[dict]:
    """One or two turns each, of several lengths."""
    rows = []
    for i in range(offset, offset + count):
        turns = [
            {"role": role, "content": " ".join(WORDS[(i + turn + j) % len(WORDS)] for j in range(1 + (i + turn) % 4))}
            for turn in range(1 + i % 2)
            for role in ("user", "assistant")
        ]
        rows.append({"messages": turns})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    model = make_tiny_chat_model(folder / "model", "qwen2")
    for name, count, offset in (("train", 12, 0), ("val", 5, 100)):
        pq.write_table(pa.Table.from_pylist(conversations(count, offset)), folder / f"{name}.parquet")
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "train_files": str(folder / "train.parquet"),
            "val_files": str(folder / "val.parquet"),
            "train_batch_size": 12,
            "max_prompt_length": 48,
            "max_response_length": 48,
        },
        "actor": {"max_tokens_per_micro_batch": 256},
        "optim": {"lr": 1e-3, "eps": 1e-4, "clip_grad": 0.5},
        "trainer": {
            "kind": "sft",
            "total_training_steps": 2,
            "val_before_train": False,
            "test_freq": 1,
            "logger": ["jsonl"],
        },
        "observe": {"peak_tflops": 0.1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    for ranks, layouts in LAYOUTS.items():
        torchrun(ranks, PROGRAM, folder / "run.yaml", folder, json.dumps(layouts))
    return folder


def loss_in_transformers(model_folder: Path, data: Path) -> tuple[torch.Tensor, torch.nn.Module]:
    """Mean negative log-prob of the assistant's tokens, from the text of each turn."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, attn_implementation="eager"
    )
    total, count = torch.zeros(()), 0
    for row in pq.read_table(data).to_pylist():
        ids: list[int] = []
        learned: list[bool] = []
        for message in row["messages"]:
            is_assistant = message["role"] == "assistant"
            for text, learn in (
                (f"<|im_start|>{message['role']}\n", False),
                (f"{message['content']}<|im_end|>", is_assistant),
                ("\n", False),
            ):
                part = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += part
                learned += [learn] * len(part)
        whole = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
        assert ids == whole  # the texts' seams are token seams in this tokenizer
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        total = total - chosen[torch.tensor(learned[1:])].sum()
        count += sum(learned)
    return total / count, model


def test_the_first_step_has_the_loss_and_gradient_of_transformers_and_is_clipped(folder: Path) -> None:
    loss, model = loss_in_transformers(folder / "model", folder / "train.parquet")
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    first = read_metrics(folder / "one")[0]
    assert first["train/loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
    assert first["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert norm > 0.5  # so that the gradient is clipped, and the comparison of layouts has a clipped step in it


@pytest.mark.parametrize("layout", ["one", "TP2 PP2"])
def test_the_validation_loss_is_that_of_the_exported_model_in_transformers(folder: Path, layout: str) -> None:
    loss, _ = loss_in_transformers(folder / layout / "hf", folder / "val.parquet")
    assert read_metrics(folder / layout)[-1]["val/loss"] == pytest.approx(loss.item(), rel=TOLERANCE)


@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_gives_the_same_metrics_and_weights(folder: Path, layout: str) -> None:
    for expected, found in zip(read_metrics(folder / "one"), read_metrics(folder / layout), strict=True):
        for name in ("train/loss", "train/grad_norm", "train/lr", "val/loss"):
            assert found[name] == pytest.approx(expected[name], rel=TOLERANCE), name
    expected, found = (load_file(folder / name / "hf" / "model.safetensors") for name in ("one", layout))
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() < TOLERANCE * tensor.norm(), name


@pytest.fixture(scope="module")
def stopping(folder: Path) -> Path:
    """`stopped`: a run that stops early. `first` is the same up to step 1, `resumed` goes on from there."""
    first = [*(key for key in STOPPING if "total" not in key), "trainer.total_training_steps=1"]
    torchrun(1, PROGRAM, folder / "run.yaml", folder, json.dumps({"stopped": STOPPING, "first": first}))
    (folder / "resumed" / "checkpoints").mkdir(parents=True)
    shutil.copytree(folder / "first" / "checkpoints" / "step-000001", folder / "resumed/checkpoints/step-000001")
    torchrun(1, PROGRAM, folder / "run.yaml", folder, json.dumps({"resumed": STOPPING}))
    return folder


def test_a_run_stops_after_its_patience_with_a_checkpoint_of_the_last_step(stopping: Path) -> None:
    lines = read_metrics(stopping / "stopped")
    losses = [line["val/loss"] for line in lines]
    best = losses.index(min(losses))
    assert [line["step"] for line in lines] == list(range(best + 3)) and len(lines) < 9
    state = json.loads((stopping / f"stopped/checkpoints/step-{best + 2:06d}/state.json").read_text())
    assert state["others"]["early_stopping"] == {
        "best_loss": min(losses),
        "best_step": best,
        "evaluations_since": 2,
    }


def test_a_resumed_run_stops_where_the_whole_one_did(stopping: Path) -> None:
    whole, resumed = (read_metrics(stopping / name) for name in ("stopped", "resumed"))
    assert [line["step"] for line in resumed] == [line["step"] for line in whole][2:]
    assert [line["val/loss"] for line in resumed] == [line["val/loss"] for line in whole][2:]


def test_a_run_that_has_stopped_does_not_go_on_when_it_is_started_again(stopping: Path) -> None:
    before = read_metrics(stopping / "stopped")
    torchrun(1, PROGRAM, stopping / "run.yaml", stopping, json.dumps({"stopped": STOPPING}))
    assert read_metrics(stopping / "stopped") == before


def test_a_run_whose_gradient_stays_nan_ends_and_says_so(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "broken")
    weights = load_file(folder / "broken" / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "broken" / "model.safetensors", {"format": "pt"})
    runs = {"broken run": [f"model.path={folder / 'broken'}", "trainer.total_training_steps=5"]}
    result = torchrun(1, PROGRAM, folder / "run.yaml", folder, json.dumps(runs), check=False)
    assert result.returncode != 0
    assert "guard.nan ends the run at step 3: train/skipped_updates is 1, above 0, in 3 steps in a row" in result.stderr
