"""A run that is resumed when its data are others: refused, unless it is told to go on with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.checkpoint.retention import checkpoint_folder
from tests.spawn import run_ranks
from tests.trainers.outcomes import DONE, is_one_sentence
from tests.trainers.resume_ranks import outcomes_and_lines
from tests.trainers.test_exact_resume import make_sft
from tests.trainers.test_sft import conversations
from tests.trainers.tiny_run import read_metrics

ROWS, BATCH = 12, 8
SAVING = ["trainer.save_freq=1", "checkpoint.export_hf=false"]
OTHER = "trainer.resume_with_other_data=true"


def to_step(step: int) -> str:
    return f"trainer.total_training_steps={step}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    make_sft(folder)
    rows = conversations(ROWS, 0)
    pq.write_table(pa.Table.from_pylist(rows[:5]), folder / "first.parquet")
    pq.write_table(pa.Table.from_pylist(rows[5:]), folder / "rest.parquet", row_group_size=2)
    pq.write_table(pa.Table.from_pylist([*rows[:-1], *conversations(1, 50)]), folder / "replaced.parquet")
    pq.write_table(pa.Table.from_pylist(conversations(ROWS + 1, 50)), folder / "more.parquet")
    return folder


def files(folder: Path, *names: str) -> str:
    return f"data.train_files=[{','.join(str(folder / name) for name in names)}]"


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """How each run ended that had two steps behind it, and the lines that it printed."""
    run = lambda runs: run_ranks(outcomes_and_lines, 1, folder / "run.yaml", folder, runs, {})[0]
    run({"whole": [*SAVING, to_step(4)]})
    replaced, more = files(folder, "replaced.parquet"), files(folder, "more.parquet")
    runs = {
        "moved": [files(folder, "first.parquet", "rest.parquet"), to_step(4)],
        "refused": [replaced, to_step(4)],
        "fewer": [more, to_step(4)],
        "taken": [*SAVING, more, OTHER, to_step(4)],
        "told without need": [OTHER, to_step(4)],
    }
    for name in runs:
        copy(folder, "whole", 2, name)
    found = run(runs)
    copy(folder, "taken", 3, "within")
    fresh = ["data.seed=1", "trainer.seed=1"]
    return found | run({"within": [more, OTHER, to_step(4)], "anew": [more, *fresh, to_step(1)]})


def copy(folder: Path, run: str, step: int, name: str) -> None:
    shutil.copytree(checkpoint_folder(folder / run, step), checkpoint_folder(folder / name, step))


def steps(folder: Path, name: str) -> dict[int, dict[str, float]]:
    """The metrics of each step, without those about time."""
    return {
        line["step"]: {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/"))}
        for line in read_metrics(folder / name)
    }


@pytest.mark.parametrize("name", ["moved", "told without need"])
def test_the_same_rows_go_on_where_they_were(found: dict, folder: Path, name: str) -> None:
    assert found[name][0] == DONE
    whole = steps(folder, "whole")
    assert steps(folder, name) == {3: whole[3], 4: whole[4]}


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "refused": ["replaced.parquet", "have 12 usable rows as before, but their rows are others"],
        "fewer": ["more.parquet", "have 13 usable rows", "but had 12"],
    }.items(),
)
def test_other_rows_are_refused_in_one_sentence(found: dict, name: str, words: list[str]) -> None:
    sentence = found[name][0]
    assert is_one_sentence(sentence)
    for word in [*words, f"{name}/checkpoints/step-000002", "trainer.resume_with_other_data"]:
        assert word in sentence


def test_a_run_that_is_told_to_begins_with_the_first_of_the_other_rows(found: dict, folder: Path) -> None:
    outcome, lines = found["taken"]
    assert outcome == DONE
    (line,) = [line for line in lines if "the first of them" in line]
    assert line.startswith("changed since the checkpoint: data.train_files have 13 usable rows")
    taken = steps(folder, "taken")
    assert [taken[step]["training/epoch"] for step in (3, 4)] == [BATCH / 13, 2 * BATCH / 13]
    # The batch that a new run with these rows begins with.
    (first,) = steps(folder, "anew").values()
    assert taken[3]["batch/padding_fraction"] == first["batch/padding_fraction"]


def test_when_it_is_interrupted_later_it_goes_on_within_them(found: dict, folder: Path) -> None:
    assert found["within"][0] == DONE
    assert not any("the first of them" in line for line in found["within"][1])
    assert steps(folder, "within") == {4: steps(folder, "taken")[4]}
