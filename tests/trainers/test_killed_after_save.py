"""A run that is killed right after a checkpoint appeared, and goes on there: metrics.jsonl has every step once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.checkpoint.retention import checkpoints_of
from megarl.checkpoint.training import CheckpointWrite
from tests.spawn import run_ranks
from tests.trainers.outcomes import DONE, outcomes
from tests.trainers.test_exact_resume import make_sft
from tests.trainers.tiny_run import make_tiny_run, read_metrics

KEYS = ["trainer.save_freq=2", "trainer.total_training_steps=4", "checkpoint.export_hf=false"]
RUNS = {"sft": [], "sft in the background": ["checkpoint.async_save=true"], "rl": []}


class Killed(BaseException):
    """Stands for the end of the process."""


def kill_and_resume(sft: str, rl: str, folder: Path) -> dict[str, list[list[int]]]:
    """Of each run the steps in metrics.jsonl when it is killed, and when it has gone on to its end."""
    finish = CheckpointWrite.finish

    def finish_and_die(self: CheckpointWrite) -> None:
        finish(self)
        raise Killed

    CheckpointWrite.is_written = lambda self: True  # type: ignore[method-assign]
    found = {}
    for name, keys in RUNS.items():
        run = {name: [*KEYS, *keys]}
        config = Path(rl if name == "rl" else sft)
        CheckpointWrite.finish = finish_and_die  # type: ignore[method-assign]
        with pytest.raises(Killed):
            outcomes(config, folder, run)
        CheckpointWrite.finish = finish  # type: ignore[method-assign]
        assert list(checkpoints_of(folder / name)) == [2]
        found[name] = [steps_of(folder / name)]
        assert outcomes(config, folder, run) == {name: DONE}
        found[name].append(steps_of(folder / name))
    return found


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    folder = tmp_path_factory.mktemp("killed")
    (steps,) = run_ranks(kill_and_resume, 1, make_sft(folder / "sft"), str(make_tiny_run(folder)), folder)
    return steps


@pytest.mark.parametrize("name", RUNS)
def test_every_step_is_in_the_metrics_once(found: dict[str, list[list[int]]], name: str) -> None:
    assert found[name] == [[1, 2], [1, 2, 3, 4]]
