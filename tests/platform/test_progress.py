"""What a process marks of itself, and the collectives that mark themselves."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

from megarl.observe import Timers
from megarl.platform import is_peer_failure
from megarl.platform.collectives import mark_collectives
from megarl.platform.progress import PROGRESS, Progress
from tests.spawn import run_ranks


def test_a_phase_ends_where_it_began_and_takes_its_micro_batches_along() -> None:
    progress = Progress()
    progress.begin_step(3)
    with progress.in_phase("step"):
        assert progress.phase is None  # it says no more than the step's number
        with progress.in_phase("update_actor"):
            progress.begin_micro_batch(2, 4)
            assert (progress.step, progress.phase, progress.micro_batch) == (3, "update_actor", (2, 4))
        assert (progress.phase, progress.micro_batch) == (None, None)


def test_after_an_exception_the_micro_batch_is_still_known() -> None:
    progress = Progress()
    with pytest.raises(ValueError), progress.in_phase("update_actor"):
        progress.begin_micro_batch(2, 4)
        raise ValueError
    assert (progress.phase, progress.micro_batch) == (None, (2, 4))


def test_timers_mark_their_phases() -> None:
    with Timers()("gen"):
        assert PROGRESS.phase == "gen"
    assert PROGRESS.phase is None


def test_a_collective_inside_of_another_is_the_outer_one() -> None:
    progress = Progress()
    assert progress.begin_collective("all_gather_object", None)
    assert not progress.begin_collective("all_gather", None)
    wait = progress.waits()
    assert wait is not None and wait.collective.name == "all_gather_object"
    progress.end_collective()
    assert progress.waits() is None


def test_silence_ends_with_the_next_mark() -> None:
    progress = Progress()
    progress.begin_collective("all_reduce", None)
    assert progress.silent_since_collective() is None
    progress.end_collective()
    silence = progress.silent_since_collective()
    assert silence is not None and silence.collective.name == "all_reduce"
    progress.begin_micro_batch(1, 2)
    assert progress.silent_since_collective() is None


def _seen_while_waiting(rank_that_waits: int) -> list[tuple[str, int]]:
    """What a second thread sees of a rank that waits for the other: names, and the size of their groups."""
    mark_collectives()
    seen = []
    pair = dist.new_group([0, 1])
    late = threading.Event()

    def look() -> None:
        while (wait := PROGRESS.waits()) is None:
            pass
        seen.append((wait.collective.name, dist.get_world_size(wait.collective.group or dist.group.WORLD)))
        dist.distributed_c10d._get_default_store().set(f"seen/{len(seen)}/{late.is_set()}", "yes")

    store = dist.distributed_c10d._get_default_store()
    for number, call in enumerate((_reduce, _reduce_later, _gather_objects, _megatron_gather), 1):
        if dist.get_rank() == rank_that_waits:
            watcher = threading.Thread(target=look)
            watcher.start()
            call(pair)
            watcher.join()
        else:
            store.wait([f"seen/{number}/False"])
            call(pair)
    return seen


def _reduce(group: Any) -> None:
    dist.all_reduce(torch.ones(1), dist.ReduceOp.SUM, group)


def _reduce_later(group: Any) -> None:
    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()


def _gather_objects(group: Any) -> None:
    dist.all_gather_object([None, None], "x", group=group)


def _megatron_gather(group: Any) -> None:
    """By a name that Megatron-Core took when it was imported."""
    mappings.dist_all_gather_func(torch.ones(2), torch.ones(1), group=group)


def test_a_rank_that_waits_in_a_collective_shows_which() -> None:
    seen = run_ranks(_seen_while_waiting, 2, 0, timeout=100.0)[0]
    assert [name for name, _ in seen] == ["all_reduce", "all_reduce", "all_gather_object", "all_gather_into_tensor"]
    assert all(size == 2 for _, size in seen)


def _lose_a_peer() -> list[bool]:
    if dist.get_rank() == 1:
        return []  # and leaves
    try:
        dist.recv(torch.ones(1), 1)
    except RuntimeError as error:
        return [is_peer_failure(error)]
    raise AssertionError("the other rank did not leave")


def test_the_end_of_another_rank_is_told_from_an_error_of_this_one() -> None:
    assert run_ranks(_lose_a_peer, 2)[0] == [True]
    assert not is_peer_failure(RuntimeError("shape '[2]' is invalid for input of size 3"))
    try:
        try:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
        except RuntimeError as error:
            raise ValueError("while saving") from error
    except ValueError as error:
        assert is_peer_failure(error)


def test_marks_do_not_depend_on_what_is_imported_first() -> None:
    program = (
        "import torch.distributed as dist, megarl.platform.collectives as c; c.mark_collectives()\n"
        "from megatron.core.tensor_parallel import mappings\n"
        "assert mappings.dist_all_gather_func is dist.all_gather_into_tensor, 'another function'\n"
        "assert hasattr(mappings.dist_all_gather_func, c._MARKED)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
