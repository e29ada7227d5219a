"""Checkpoints that cannot be resumed or written, and configs that changed: what a run says, and what it does then."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.checkpoint.retention import checkpoint_folder, checkpoints_of
from megarl.checkpoint.run_lock import RunLock
from tests.launch import torchrun
from tests.spawn import run_ranks
from tests.tiny_models import make_hf_model
from tests.trainers.outcomes import DONE, is_one_sentence
from tests.trainers.resume_ranks import outcomes_and_lines
from tests.trainers.tiny_run import make_tiny_run, read_metrics


def to_step(step: int) -> str:
    return f"trainer.total_training_steps={step}"


def truncate(folder: Path) -> None:
    file = folder / "optimizer" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:100])


def save_as_sft(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    state["config"]["trainer"]["kind"] = "sft"
    replace(folder, "state.json", json.dumps(state).encode())


def spoil_metadata(folder: Path) -> None:
    replace(folder, "optimizer/.metadata", b"no pickle")


def replace(folder: Path, name: str, content: bytes) -> None:
    """A file of the checkpoint, with the sums that it has then."""
    (folder / name).write_bytes(content)
    listed = json.loads((folder / "files.json").read_text())
    listed["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (folder / "files.json").write_text(json.dumps(listed))


def newest(folder: Path) -> None:
    """Damages the newer of two checkpoints."""
    truncate(folder.with_name("step-000002"))


def both(folder: Path) -> None:
    truncate(folder)
    newest(folder)


def leave_remains(folder: Path) -> None:
    folder.with_name(".step-000007.partial-ab12").mkdir()


def put_a_file_in_the_way(folder: Path) -> None:
    shutil.rmtree(folder.parent)
    folder.parent.write_text("")


def nothing(folder: Path) -> None:
    pass


PREPARATIONS: dict[str, Callable[[Path], None]] = {
    "all damaged": both,
    "newest damaged": newest,
    "other kind": save_as_sft,
    "not readable": spoil_metadata,
    "remains": leave_remains,
    "not writable": put_a_file_in_the_way,
}
"""What happens to a run's folder, which has the checkpoints of steps 1 and 2, before the run goes on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_tiny_run(
        folder,
        trainer={"save_freq": 1, "total_training_steps": 3},
        optim={"lr": 1e-3},
        checkpoint={"export_hf": False},
    )
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """How each run ended, and the lines that it printed."""
    vocab_size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    shutil.copytree(folder / "model", folder / "wider")
    make_hf_model("qwen3", folder / "wider", vocab_size=vocab_size, intermediate_size=256)
    run_ranks(outcomes_and_lines, 1, folder / "run.yaml", folder, {"begin": [to_step(2)]}, {})
    path = lambda name: f"trainer.resume_from_path={checkpoint_folder(folder / name, 1)}"
    runs = {
        "all damaged": [],
        "newest damaged": [],
        "path damaged": ["trainer.resume_mode=path", path("all damaged")],
        "other kind": ["trainer.resume_mode=path", path("other kind")],
        "not readable": ["trainer.resume_mode=path", path("not readable")],
        "not writable": [],
        "remains": ["checkpoint.keep_last=1", "checkpoint.keep_best=1", "checkpoint.best_metric=actor/lr", to_step(4)],
        "another model": [f"model.path={folder / 'wider'}"],
        "another dtype": ["model.dtype=bfloat16"],
        "another batch": ["data.train_batch_size=8", "trainer.total_training_steps=null"],
        "a critic more": ["algorithm.adv_estimator=gae"],
        "changed": [
            "optim.lr=0.002",
            "algorithm.adv_estimator=rloo",
            "actor.policy_loss=gspo",
            "data.seed=1",
            "parallel.use_distributed_optimizer=false",
        ],
        "unknown metric": ["checkpoint.keep_last=1", "checkpoint.keep_best=1", "checkpoint.best_metric=critic/scor"],
        "full": [],
        "full and warned": ["checkpoint.on_failure=warn", "checkpoint.async_save=true", to_step(4)],
        "anew": ["trainer.resume_mode=disable", to_step(1)],
    }
    for name in runs:
        shutil.copytree(folder / "begin", folder / name)
        PREPARATIONS.get(name, nothing)(checkpoint_folder(folder / name, 1))
    limits = {"full": 100_000, "full and warned": 100_000}
    (found,) = run_ranks(outcomes_and_lines, 1, folder / "run.yaml", folder, runs, limits, timeout=200)
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "all damaged": ["step-000002 is incomplete", "step-000001 is incomplete", "none before is whole", "path"],
        "path damaged": ["all damaged/checkpoints/step-000001", "__0_0.distcp has 100 bytes", "name another one"],
        "other kind": ["trainer.kind sft, but this run has rl", "restore what it was"],
        "not readable": ["not readable/checkpoints/step-000001/optimizer is incomplete or damaged"],
        "not writable": ["checkpoints cannot be written into", "not writable/checkpoints", "save_freq"],
        "another model": ["is a checkpoint of another model"],
        "another dtype": ["was made with model.dtype float32, but this run has bfloat16"],
        "another batch": ["with data.train_batch_size 4, but this run has 8", "trainer.total_training_steps would"],
        "a critic more": ["has no critic, which this run has"],
        "unknown metric": ["checkpoint.best_metric critic/scor is none", "such as critic/score"],
        "full": ["checkpoint of step 3 was not saved", "full/checkpoints/step-000003", "File too large", "is whole"],
    }.items(),
)
def test_a_run_that_cannot_go_on_says_why_in_one_sentence(found: dict, name: str, words: list[str]) -> None:
    sentence = found[name][0]
    assert all(word in sentence for word in words), sentence
    assert is_one_sentence(sentence) or name in ("another model", "not readable"), sentence
    assert ".partial" not in sentence


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_at_the_one_before(found: dict, folder: Path) -> None:
    outcome, lines = found["newest damaged"]
    assert outcome == DONE
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert "step-000002 is incomplete or damaged: optimizer/__0_0.distcp has 100 bytes" in warning
    assert warning.endswith("step-000001, the newest that is whole")
    assert list(checkpoints_of(folder / "newest damaged")) == [1, 2, 3]
    assert (folder / "newest damaged/checkpoints/set-aside/step-000002").is_dir()
    assert [line["step"] for line in read_metrics(folder / "newest damaged")] == [1, 2, 3]


def test_nothing_is_moved_or_deleted_where_no_checkpoint_is_whole(found: dict, folder: Path) -> None:
    assert list(checkpoints_of(folder / "all damaged")) == [1, 2]


def test_what_changed_in_the_config_is_listed_a_line_each_and_counts(found: dict, folder: Path) -> None:
    outcome, lines = found["changed"]
    assert outcome == DONE
    assert [line for line in lines if line.startswith("changed")] == [
        "changed since the checkpoint: data.seed: null → 1",
        "changed since the checkpoint: parallel.use_distributed_optimizer: true → false",
        "changed since the checkpoint: actor.policy_loss: ppo → gspo",
        "changed since the checkpoint: algorithm.adv_estimator: grpo → rloo",
        "changed since the checkpoint: optim.lr: 0.001 → 0.002",
        "changed since the checkpoint: trainer.total_training_steps: 2 → 3",
    ]
    assert [line["actor/lr"] for line in read_metrics(folder / "changed")] == [0.001, 0.001, 0.002]


def test_remains_of_a_killed_save_go_and_the_newest_and_the_best_checkpoint_stay(found: dict, folder: Path) -> None:
    assert found["remains"][0] == DONE
    # Those of steps 1 and 2 were saved without the metric; of 3 and 4, which are equally good, the later one is best.
    assert [path.name for path in (folder / "remains" / "checkpoints").iterdir()] == ["step-000004"]


def test_a_best_metric_that_does_not_exist_costs_no_checkpoint(found: dict, folder: Path) -> None:
    assert 3 in checkpoints_of(folder / "unknown metric")


def test_a_full_disk_leaves_the_checkpoints_before_and_nothing_else(found: dict, folder: Path) -> None:
    for name in ("full", "full and warned"):
        names = sorted(path.name for path in (folder / name / "checkpoints").iterdir())
        assert names == ["step-000001", "step-000002"]


def test_a_run_that_is_told_to_goes_on_without_its_checkpoints(found: dict, folder: Path) -> None:
    outcome, lines = found["full and warned"]
    assert outcome == DONE
    warnings = [line for line in lines if line.startswith("warning")]
    assert [f"the checkpoint of step {step} was not saved" in line for step, line in zip((3, 4), warnings, strict=True)]
    assert len(read_metrics(folder / "full and warned")) == 4


def test_a_run_that_begins_anew_moves_the_checkpoints_of_the_old_one(found: dict, folder: Path) -> None:
    assert found["anew"][0] == DONE
    assert list(checkpoints_of(folder / "anew")) == [1]
    state = json.loads((checkpoint_folder(folder / "anew", 1) / "state.json").read_text())
    assert state["config"]["trainer"]["total_training_steps"] == 1
    aside = folder / "anew" / "checkpoints" / "set-aside"
    assert sorted(path.name for path in aside.iterdir()) == ["step-000001", "step-000002"]


def test_a_second_run_in_a_folder_is_refused(folder: Path) -> None:
    lock = RunLock(folder / "locked")
    lock.acquire()
    try:
        keys = [f"trainer.default_local_dir={folder / 'locked'}"]
        result = torchrun(1, "launch/train.py", "--config", folder / "run.yaml", *keys, check=False)
    finally:
        lock.release()
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("rank 0")]
    assert result.returncode != 0
    assert f"{folder / 'locked'} is in use by a run on" in said
    assert [path.name for path in (folder / "locked").iterdir()] == ["run.lock"]
