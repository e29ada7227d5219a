"""Which checkpoints stay, and that those which go are gone at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.retention import (
    Retention,
    checkpoint_folder,
    checkpoints_of,
    clean_up,
    delete,
    set_aside,
)

METRICS = {2: 0.5, 4: 0.9, 6: None, 8: 0.9, 10: float("nan"), 12: 0.1}


def rules(**given: Any) -> Retention:
    return Retention(**{"keep_last": None, "keep_every": None, "keep_best": 0, "best_mode": "max", **given})


@pytest.mark.parametrize(
    ("given", "protected", "kept"),
    [
        ({}, (), [2, 4, 6, 8, 10, 12]),
        ({"keep_last": 1}, (), [12]),
        ({"keep_last": 2}, (), [10, 12]),
        ({"keep_last": 9}, (), [2, 4, 6, 8, 10, 12]),
        ({"keep_last": 1, "keep_every": 4}, (), [4, 8, 12]),
        # Of the two best, which are equal, the later one.
        ({"keep_last": 1, "keep_best": 1}, (), [8, 12]),
        ({"keep_last": 1, "keep_best": 3}, (), [2, 4, 8, 12]),
        # An unknown metric and NaN are never best.
        ({"keep_last": 1, "keep_best": 9}, (), [2, 4, 8, 12]),
        ({"keep_last": 1, "keep_best": 1, "best_mode": "min"}, (), [12]),
        ({"keep_last": 1}, (6, 7), [6, 12]),
    ],
)
def test_a_checkpoint_stays_that_any_rule_names(given: dict[str, Any], protected: tuple, kept: list[int]) -> None:
    surplus = rules(**given).surplus(METRICS, protected)
    assert sorted({*METRICS} - {*surplus}) == kept


def test_the_only_checkpoint_is_never_deleted() -> None:
    assert rules(keep_last=1, keep_every=5).surplus({3: None}) == []
    assert rules(keep_last=1).surplus({}) == []


def make(run: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_folder(run, step).mkdir(parents=True)
        (checkpoint_folder(run, step) / "state.json").write_text("{}")


def test_checkpoints_are_found_by_step_and_unfinished_ones_are_not(tmp_path: Path) -> None:
    make(tmp_path, 10, 2, 1_000_000)
    for name in (".step-000012.partial-ab12", ".step-000001.deleted-ab12", "step-000003.txt", "step-old", "set-aside"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert list(checkpoints_of(tmp_path)) == [2, 10, 1_000_000]


def test_a_deleted_checkpoint_is_renamed_before_a_file_of_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 2)
    seen = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: seen.append(sorted(p.name for p in path.iterdir())))
    delete(checkpoint_folder(tmp_path, 2))
    assert seen == [["state.json"]]
    assert checkpoints_of(tmp_path) == {}


def test_what_killed_saves_left_is_cleaned_up_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, 2)
    for name in (".step-000004.partial-ab12", ".step-000001.deleted-ab12", ".hidden"):
        (tmp_path / "checkpoints" / name).mkdir()
    clean_up(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [".hidden", "step-000002"]


def test_later_checkpoints_are_moved_and_never_over_others(tmp_path: Path) -> None:
    make(tmp_path, 2, 4, 6)
    assert [path.name for path in set_aside(tmp_path, after=2)] == ["step-000004", "step-000006"]
    assert list(checkpoints_of(tmp_path)) == [2]
    make(tmp_path, 4)
    (moved,) = set_aside(tmp_path, after=2)
    assert moved.name == "step-000004-2"
    assert {path.name for path in moved.parent.iterdir()} == {"step-000004", "step-000006", "step-000004-2"}
