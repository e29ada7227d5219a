"""A run that torchrun or Slurm starts again goes on where it was, however it was told to begin."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megarl.checkpoint.retention import checkpoint_folder, checkpoints_of
from tests.spawn import run_ranks
from tests.trainers.resume_ranks import outcomes_and_lines
from tests.trainers.test_exact_resume import make_sft

SAVING = "trainer.save_freq=1"
ANEW = [SAVING, "trainer.resume_mode=disable"]


def to_step(step: int) -> str:
    return f"trainer.total_training_steps={step}"


def run_and_restart(config: str, folder: Path) -> dict[str, list[str]]:
    """What runs print that begin beside the checkpoints of others, and when they are started again."""
    run = lambda name, *keys: outcomes_and_lines(Path(config), folder, {name: list(keys)}, {})[name][1]
    run("old", SAVING, to_step(3))
    path = [SAVING, "trainer.resume_mode=path", f"trainer.resume_from_path={checkpoint_folder(folder / 'old', 1)}"]
    for name in ("anew", "ended too early"):
        shutil.copytree(folder / "old", folder / name)
    run("anew", *ANEW, to_step(2))
    run("path", *path, to_step(3))
    said = {"by hand": run("path", *path, to_step(3))}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    said["path"] = run("path", *path, to_step(4))
    said["ended too early"] = run("ended too early", *ANEW, to_step(2))
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    os.environ["SLURM_RESTART_COUNT"] = "2"
    said["anew"] = run("anew", *ANEW, to_step(4))
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("restarts")
    (found,) = run_ranks(run_and_restart, 1, make_sft(folder / "sft"), folder)
    return folder, found


@pytest.mark.parametrize(("name", "step"), [("anew", 2), ("path", 3)])
def test_a_restarted_run_goes_on_at_its_own_newest_checkpoint(said: tuple[Path, dict], name: str, step: int) -> None:
    folder, lines = said
    assert f"resumed after step {step} from {checkpoint_folder(folder / name, step)}" in lines[name]
    assert max(checkpoints_of(folder / name)) == 4


def test_a_restarted_run_that_begins_anew_leaves_the_checkpoints_of_others_alone(said: tuple[Path, dict]) -> None:
    folder, lines = said
    assert not any(line.startswith("resumed") for line in lines["ended too early"])
    assert list(checkpoints_of(folder / "ended too early")) == [1, 2]


def test_a_run_that_a_person_starts_again_begins_where_it_is_told_to(said: tuple[Path, dict]) -> None:
    folder, lines = said
    assert f"resumed after step 1 from {checkpoint_folder(folder / 'old', 1)}" in lines["by hand"]
