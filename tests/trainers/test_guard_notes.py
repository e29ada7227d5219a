"""A run says which of its guards cannot act, and they could not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spawn import run_ranks
from tests.trainers.outcomes import DONE
from tests.trainers.resume_ranks import outcomes_and_lines
from tests.trainers.tiny_run import make_tiny_run, read_metrics

STEPS = 2
GUARDS = {
    "guard.kl": "guard.kl={above: 1e-12, action: stop}",
    "guard.rules[0]": "guard.rules=[{metric: actor/entropy, above: 0, window: 3, action: stop}]",
}
"""Each would end a run in which its metric is above the bound in as many steps as it looks at."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def found(folder: Path) -> tuple[str, list[str]]:
    """How the run ended, and the lines that it printed."""
    config = make_tiny_run(
        folder,
        actor={"ppo_mini_batch_size": 4},
        trainer={"total_training_steps": STEPS, "val_before_train": False, "logger": ["jsonl"]},
        checkpoint={"export_hf": False},
    )
    (ends,) = run_ranks(outcomes_and_lines, 1, config, folder, {"run": list(GUARDS.values())}, {})
    return ends["run"]


def test_each_is_noted_once(found: tuple[str, list[str]]) -> None:
    _, lines = found
    notes = [line for line in lines if line.startswith("note: guard")]
    assert [line.split(" cannot act in this run: ")[0] for line in notes] == [f"note: {key}" for key in GUARDS]


def test_none_of_them_acted(found: tuple[str, list[str]], folder: Path) -> None:
    assert found[0] == DONE
    lines = read_metrics(folder / "run")
    assert [line["actor/ppo_kl"] for line in lines] == [0.0] * STEPS
    assert len(lines) == STEPS and all(line["actor/entropy"] > 0 for line in lines)
