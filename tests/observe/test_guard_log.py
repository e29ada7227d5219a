"""guards.jsonl has what guards did in this run, and no more after a resume than the checkpoint knew of."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megarl.observe.guard_log import GuardLog


def no_warning(text: str) -> None:
    pytest.fail(text)


def open_log(folder: Path, lines: int | None, *, is_main: bool = True) -> GuardLog:
    return GuardLog(folder, is_main, no_warning, lines=lines)


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "guards.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_line_is_an_object_in_which_nan_is_null(tmp_path: Path) -> None:
    log = open_log(tmp_path / "run", None)
    log.write({"step": 3, "value": math.nan, "threshold": None, "done": "nothing: λ"})
    assert lines_of(tmp_path / "run") == [{"step": 3, "value": None, "threshold": None, "done": "nothing: λ"}]


def test_a_resumed_run_cuts_what_came_after_its_checkpoint_whatever_the_steps_say(tmp_path: Path) -> None:
    """After a rollback, lines of later steps come before lines of earlier ones."""
    first = open_log(tmp_path, None)
    for step in (12, 9, 11):
        first.write({"step": step})
    with (tmp_path / "guards.jsonl").open("a") as stream:
        stream.write('{"step": 1')  # a killed process
    second = open_log(tmp_path, 2)
    second.write({"step": 10})
    assert [line["step"] for line in lines_of(tmp_path)] == [12, 9, 10]


def test_a_run_that_begins_moves_the_lines_of_an_earlier_one_aside(tmp_path: Path) -> None:
    open_log(tmp_path, None).write({"step": 1})
    second = open_log(tmp_path, None)
    assert not (tmp_path / "guards.jsonl").exists() and (tmp_path / "guards-1.jsonl").exists()
    second.write({"step": 2})
    assert [line["step"] for line in lines_of(tmp_path)] == [2]


def test_only_the_main_rank_writes(tmp_path: Path) -> None:
    open_log(tmp_path, None, is_main=False).write({"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    said: list[str] = []
    log = GuardLog(tmp_path / "run", True, said.append, lines=None)
    log.write({"step": 1})
    assert len(said) == 1 and "guards.jsonl cannot be written" in said[0] and "guards act all the same" in said[0]
