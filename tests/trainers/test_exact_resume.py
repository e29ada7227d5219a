"""A run interrupted at any step and resumed is, bit for bit, the one that was not; no layout loses anything."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
import yaml
from safetensors.torch import load_file

from megarl.checkpoint.retention import checkpoint_folder, checkpoints_of
from tests.launch import torchrun
from tests.trainers.test_sft import conversations
from tests.trainers.tiny_pairs import make_tiny_chat_model
from tests.trainers.tiny_run import make_tiny_run, read_metrics

PROGRAM = "tests/trainers/train_in_layouts.py"
TP, PP = "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"
STEPS = 4
TOLERANCE = 1e-6
SAVING = ["trainer.save_freq=1", f"trainer.total_training_steps={STEPS}"]
ABOUT_TIME = ("timing_s/", "perf/")


def resumed_from(folder: Path, run: str, step: int, *keys: str) -> list[str]:
    path = checkpoint_folder(folder / run, step)
    total = f"trainer.total_training_steps={STEPS}"
    return [*keys, total, "trainer.resume_mode=path", f"trainer.resume_from_path={path}"]


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A config with a reference model, several updates a step, and groups that are filtered; and where runs go."""
    folder = tmp_path_factory.mktemp("grpo")
    config = make_tiny_run(
        folder,
        actor={"ppo_mini_batch_size": 2, "use_kl_loss": True, "kl_loss_coef": 0.05},
        optim={"lr": 1e-3, "eps": 1e-4, "lr_warmup_steps": 2, "lr_decay_style": "cosine"},
        algorithm={"filter_groups": {"enable": True, "metric": "score"}},
    )
    return config, folder


@pytest.fixture(scope="module")
def two(grpo: tuple[Path, Path]) -> Path:
    """On two ranks: each run whole, with a save in the background after each step, and resumed after each."""
    config, folder = grpo
    sft = make_sft(folder / "sft")
    background = "checkpoint.async_save=true"
    runs = {
        "whole": [*SAVING, background],
        **{f"from {step}": resumed_from(folder, "whole", step) for step in range(1, STEPS)},
        "sft whole": [sft, *SAVING, background],
        **{f"sft from {step}": [sft, *resumed_from(folder, "sft whole", step)] for step in range(1, STEPS)},
        "sft TP2 from 2": [sft, *resumed_from(folder, "sft whole", 2, TP)],
        "sft TP2 Adam": [sft, TP, "parallel.use_distributed_optimizer=false", *SAVING],
        "sft DP2 Adam from 2": [
            sft,
            *resumed_from(folder, "sft TP2 Adam", 2, "parallel.use_distributed_optimizer=false"),
        ],
        "sft stopped": [sft, *STOPPING],
    }
    torchrun(2, PROGRAM, config, folder, json.dumps(runs))
    return folder


STOPPING = [
    "trainer.total_training_steps=8",
    "trainer.save_freq=1",
    "checkpoint.keep_last=1",
    "trainer.test_freq=1",
    "trainer.early_stopping_patience=1",
    # The rate rises until the loss does.
    "optim.lr=0.4",
    "optim.lr_warmup_steps=6",
]


def make_sft(folder: Path) -> str:
    model = make_tiny_chat_model(folder / "model", "qwen2")
    for name, count, offset in (("train", 12, 0), ("val", 5, 100)):
        pq.write_table(pa.Table.from_pylist(conversations(count, offset)), folder / f"{name}.parquet")
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "train_files": str(folder / "train.parquet"),
            "val_files": str(folder / "val.parquet"),
            "train_batch_size": 8,
            "max_prompt_length": 48,
            "max_response_length": 48,
        },
        "actor": {"max_tokens_per_micro_batch": 256},
        "optim": {"lr": 1e-3, "eps": 1e-4, "lr_warmup_steps": 2},
        "trainer": {"kind": "sft", "val_before_train": False, "logger": ["jsonl"]},
        "observe": {"peak_tflops": 0.1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "run.yaml")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "hf" / "model.safetensors")


def assert_the_same_run(whole: Path, resumed: Path, step: int) -> None:
    """Weights, and the metrics of the steps after `step`, bit for bit."""
    expected, found = weights(whole), weights(resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    lines = {line["step"]: line for line in read_metrics(resumed)}
    assert sorted(lines) == list(range(step + 1, STEPS + 1))
    for line in read_metrics(whole):
        if line["step"] > step:
            same = {name: value for name, value in line.items() if not name.startswith(ABOUT_TIME)}
            assert {name: lines[line["step"]][name] for name in same} == same


@pytest.mark.parametrize("step", range(1, STEPS))
@pytest.mark.parametrize("run", ["", "sft "])
def test_a_run_resumed_after_any_step_is_bit_identical(two: Path, run: str, step: int) -> None:
    assert_the_same_run(two / f"{run}whole", two / f"{run}from {step}", step)


def test_the_runs_moved_their_weights_in_every_step(two: Path) -> None:
    for run in ("whole", "sft whole"):
        assert all(line.get("actor/grad_norm", line.get("train/grad_norm")) > 0.01 for line in read_metrics(two / run))


@pytest.mark.parametrize(
    ("whole", "resumed"), [("sft whole", "sft TP2 from 2"), ("sft TP2 Adam", "sft DP2 Adam from 2")]
)
def test_in_another_layout_the_losses_agree_and_no_optimizer_state_is_lost(two: Path, whole: str, resumed: str) -> None:
    expected = [line for line in read_metrics(two / whole) if line["step"] > 2]
    found = read_metrics(two / resumed)
    for one, other in zip(expected, found, strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=TOLERANCE)
        assert other["train/lr"] == one["train/lr"]
    # Without its moments Adam would move each weight by about the learning rate, whatever the gradient.
    before = load_file(two / "sft" / "model" / "model.safetensors")
    for name, tensor in weights(two / whole).items():
        assert (weights(two / resumed)[name] - tensor).norm() < 1e-3 * (tensor - before[name]).norm(), name


def test_early_stopping_exports_the_weights_of_the_best_step_whose_checkpoint_stays(two: Path) -> None:
    losses = {line["step"]: line["val/loss"] for line in read_metrics(two / "sft stopped")}
    best, last = min(losses, key=losses.__getitem__), max(losses)
    assert 0 < best < last, "the run is not one that gets worse after it got better"
    assert list(checkpoints_of(two / "sft stopped")) == [best, last]
    state = json.loads((checkpoint_folder(two / "sft stopped", last) / "state.json").read_text())
    assert state["others"]["early_stopping"]["best_step"] == best
    assert_the_weights_are_those_of(two / "sft stopped", best)


def assert_the_weights_are_those_of(run: Path, step: int) -> None:
    """Compares the export with a tensor that torch reads from the checkpoint."""
    found = weights(run)["model.norm.weight"]
    reader = torch_checkpoint.FileSystemReader(checkpoint_folder(run, step) / "weights")
    metadata = reader.read_metadata()
    (key,) = [name for name in metadata.state_dict_metadata if name.endswith("final_layernorm.weight")]
    target = {key: torch.zeros(metadata.state_dict_metadata[key].size)}
    torch_checkpoint.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target[key].view(-1), found)


def test_a_run_in_tp2_pp2_resumed_is_bit_identical(grpo: tuple[Path, Path]) -> None:
    config, folder = grpo
    runs = {"four": [TP, PP, *SAVING], "four from 2": resumed_from(folder, "four", 2, TP, PP)}
    torchrun(4, PROGRAM, config, folder, json.dumps(runs))
    assert_the_same_run(folder / "four", folder / "four from 2", 2)
