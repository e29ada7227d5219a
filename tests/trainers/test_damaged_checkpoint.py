"""A run that cannot go on at its checkpoint says so in one sentence, which names the file, and saves nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import torchrun
from tests.trainers.tiny_run import make_tiny_run

PROGRAM = "launch/train.py"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with a checkpoint, in `out` beside its config."""
    config = make_tiny_run(tmp_path_factory.mktemp("run"), trainer={"save_freq": 1, "val_before_train": False})
    torchrun(1, PROGRAM, "--config", config, "trainer.total_training_steps=1")
    return config


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def save_as_sft(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "kind": "sft"}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: truncate(folder / "state.json"), ["state.json cannot be read"]),
        (lambda folder: truncate(folder / "optimizer" / ".metadata"), ["optimizer is incomplete or damaged"]),
        (lambda folder: truncate(folder / "optimizer" / "common.pt"), ["optimizer is incomplete or damaged"]),
        (lambda folder: truncate(folder / "optimizer" / "__0_0.distcp"), ["optimizer is incomplete or damaged"]),
        (lambda folder: shutil.rmtree(folder / "optimizer"), ["optimizer is incomplete or damaged", "does not exist"]),
        (lambda folder: truncate(folder / "rng" / "rank-00000.pt"), ["rank-00000.pt", "incomplete or damaged"]),
        (save_as_sft, ["trainer.kind sft, but this run has rl"]),
    ],
    ids=["state", "metadata", "common state", "moments", "no optimizer", "generators", "other kind"],
)
def test_a_checkpoint_that_cannot_be_resumed_is_refused_in_one_sentence(
    config: Path, tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    shutil.copytree(config.parent / "out" / "checkpoints" / "step-000001", checkpoint)
    damage(checkpoint)
    settings = ["trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path}"]
    result = torchrun(1, PROGRAM, "--config", config, *settings, check=False)
    said = [line for line in result.stderr.splitlines() if line.startswith("rank 0")]
    assert result.returncode != 0
    assert len(said) == 1
    assert str(checkpoint) in said[0]
    assert all(word in said[0] for word in words), said[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
