"""Rollouts on disk are those of one run, whatever ran there before, and are replayed whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import ConfigError
from megarl.data.sample import Prompt, Sample
from megarl.trainers.dump import RolloutDump, RolloutReplay, read_step

STEP = 3


def sample(group: int, index: int, *, token: int = 3) -> Sample:
    return Sample(
        prompt=Prompt(row=group, token_ids=[1, 2], messages=[], data_source="sums"),
        group=group,
        index=index,
        response_ids=[token],
        response_mask=[1],
        rollout_logprobs=[-1.0],
        finish_reason="stop",
        weight_version=0,
        rewards={"score": 1.0},
    )


def write(folder: Path, ranks: int, *, token: int) -> None:
    """Four prompts of two samples, shared out to ranks."""
    for rank in range(ranks):
        mine = [sample(group, index, token=token) for group in range(rank, 4, ranks) for index in range(2)]
        RolloutDump(folder, rank, ranks).write(STEP, mine)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_that_is_written_again_by_other_ranks_is_that_of_the_last_run(tmp_path: Path, ranks: int) -> None:
    write(tmp_path, 4, token=3)
    write(tmp_path, ranks, token=4)
    found = RolloutReplay(tmp_path, 2).read(STEP, range(4))
    assert [(one.group, one.index) for one in found] == [(group, index) for group in range(4) for index in range(2)]
    assert {one.response_ids[0] for one in found} == {4}


def test_files_of_two_runs_are_not_taken_for_one(tmp_path: Path) -> None:
    write(tmp_path, 1, token=3)
    (path,) = tmp_path.glob("step-*/rank-00000.jsonl")
    path.with_name("rank-00001.jsonl").write_text(path.read_text())
    with pytest.raises(ConfigError, match=r"rank-00001.jsonl, line 1 is another sample 0 of prompt 0"):
        read_step(tmp_path, STEP)


@pytest.mark.parametrize(("n", "prompts"), [(1, 4), (3, 4), (2, 5)])
def test_rollouts_of_another_n_or_batch_are_refused(tmp_path: Path, n: int, prompts: int) -> None:
    write(tmp_path, 1, token=3)
    replay = RolloutReplay(tmp_path, n)
    with pytest.raises(ConfigError, match=r"samples of prompt \d, where rollout.n is"):
        replay.read(STEP, range(prompts))
