"""Whom a report of a hang blames, for ranks in every state."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from megarl.observe.hang_report import Answer, Hang
from megarl.observe.rank_record import RankRecord, name_ranks, record_of_this_process, stacks_of_this_process
from megarl.processes.identity import start_of

STACK = "thread MainThread:\n  a stack"


def record(rank: int, *, phase: str = "update_actor", waited_s: float | None = 61.0) -> RankRecord:
    return RankRecord(
        rank=rank,
        host=f"node-{rank // 2}",
        pid=1000 + rank,
        time=0.0,
        step=3,
        phase=phase,
        micro_batch=(2, 4),
        collective="all_reduce",
        group=(0, 1, 2, 3),
        waited_s=waited_s,
    )


def hang(waiting: list[int], busy: list[int], silent: list[int], unknown: list[int] = []) -> Hang:  # noqa: B006
    records = [record(rank) for rank in waiting] + [record(rank, phase="gen", waited_s=None) for rank in busy]
    answers = [Answer(record=each, stacks=STACK) for each in records]
    return Hang(finder=answers[0], answers=answers, silent=[record(rank) for rank in silent], unknown=unknown)


def test_a_rank_that_does_not_answer_is_to_blame() -> None:
    found = hang([0, 1], [3], [2])
    assert found.sentence() == (
        "the run hangs: rank 0 has waited 61 s in all_reduce of ranks 0-3, in update_actor of step 3, micro-batch 2 of "
        "4; rank 2 (process 1002 on node-1) does not answer, and was last seen in update_actor of step 3, "
        "micro-batch 2 of 4"
    )


def test_where_all_answer_a_rank_that_waits_for_nobody_is_to_blame() -> None:
    assert hang([0, 1, 2], [3], []).blame() == (
        "rank 3 (process 1003 on node-1) is not there, but in gen of step 3, micro-batch 2 of 4"
    )


def test_ranks_that_all_wait_have_lost_one_another() -> None:
    assert hang([0, 1, 2, 3], [], []).blame() == "every rank waits, but not all in the same collective"


def test_a_rank_that_never_said_anything_is_named() -> None:
    assert hang([0], [], [], [2, 3]).blame() == "ranks 2-3 never said anything"


def test_a_sentence_names_some_ranks_and_counts_the_others() -> None:
    blame = hang([0], [], list(range(1, 10))).blame()
    assert blame.count("does not answer") == 4
    assert blame.endswith("; and 5 more")
    assert "more" not in hang([0], [], [1, 2, 3, 4]).blame()
    assert hang([0], list(range(1, 10)), []).blame().endswith("; and 5 more")


def test_a_report_has_every_rank_once_and_all_stacks() -> None:
    text = hang([0, 1], [3], [2]).report()
    silent, _, rest = text.partition("Busy, in no collective:")
    busy, _, waiting = rest.partition("Waiting:")
    assert "rank 2 (process 1002 on node-1): last seen at" in silent
    assert "rank 3 (process 1003 on node-1): in gen of step 3" in busy
    assert "ranks 0-1: for 61 s in all_reduce of ranks 0-3, in update_actor of step 3, micro-batch 2 of 4" in waiting
    assert waiting.count(STACK) == 3
    # Those that are to blame come first.
    assert waiting.index("rank 3 (process") < waiting.index("rank 0 (process")


@pytest.mark.parametrize(("ranks", "name"), [([3], "rank 3"), ([1, 0, 2, 5], "ranks 0-2, 5"), ([0, 2], "ranks 0, 2")])
def test_ranks_are_named_by_spans(ranks: list[int], name: str) -> None:
    assert name_ranks(ranks) == name


def test_a_record_survives_its_journey() -> None:
    sent = record(1)
    assert RankRecord.from_json(sent.to_json()) == sent
    bare = replace(sent, micro_batch=None, step=None, waited_s=None)
    assert RankRecord.from_json(bare.to_json()) == bare


def test_a_process_that_is_gone_is_not_alive_even_where_nobody_has_looked_at_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = record_of_this_process(0, start_of(os.getpid()), None)
    of_child = replace(here, pid=child.pid, started=start_of(child.pid))
    assert here.is_alive_here() and of_child.is_alive_here()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert of_child.is_alive_here() is False
    child.communicate()
    assert of_child.is_alive_here() is False
    assert replace(of_child, host="another").is_alive_here() is None
    assert replace(here, started="a process before").is_alive_here() is False


def test_stacks_name_the_function_that_runs() -> None:
    assert "in test_stacks_name_the_function_that_runs" in stacks_of_this_process().partition("thread MainThread")[2]
