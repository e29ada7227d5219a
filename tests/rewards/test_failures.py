"""Whatever a reward function does to its process, its response has a named failure and the others have their scores."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.data.sample import Sample
from megarl.rewards.outcome import FailureKind
from tests.launch import LIMIT_S
from tests.rewards.samples import custom_manager, sample, score_all

FUNCTION = """
import asyncio, os, re, signal, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "good":
        return 1.0
    return eval(solution_str)

def forever():
    while True:
        pass

def stop(error):
    raise error
"""

FAILURES = {
    "forever()": (FailureKind.TIMEOUT, "timeout: the reward function took longer than 3 s"),
    # C code that never gives the interpreter back: no thread or Python signal handler could stop it.
    "re.match('(a+)+$', 'a' * 60 + 'b')": (FailureKind.TIMEOUT, "timeout: the reward function took longer than 3 s"),
    "subprocess.run(['sleep', '1000'])": (FailureKind.TIMEOUT, "timeout: the reward function took longer than 3 s"),
    "[signal.signal(signal.SIGUSR2, signal.SIG_IGN), forever()]": (
        FailureKind.TIMEOUT,
        "timeout: the reward function took longer than 3 s",
    ),
    "1 / 0": (FailureKind.EXCEPTION, "exception: ZeroDivisionError: division by zero"),
    "sys.exit(3)": (FailureKind.EXCEPTION, "exception: SystemExit: 3"),
    "stop(KeyboardInterrupt())": (FailureKind.EXCEPTION, "exception: KeyboardInterrupt"),
    "os._exit(3)": (FailureKind.WORKER_DIED, "worker_died: the reward worker ended with exit status 3"),
    "os._exit(0)": (FailureKind.WORKER_DIED, "worker_died: the reward worker ended with exit status 0"),
    "os.kill(os.getpid(), signal.SIGKILL)": (
        FailureKind.WORKER_DIED,
        "worker_died: the reward worker was killed by SIGKILL (out of memory?)",
    ),
    "os.kill(os.getpid(), signal.SIGSEGV)": (
        FailureKind.WORKER_DIED,
        "worker_died: the reward worker was killed by SIGSEGV",
    ),
    "os.closerange(3, 100) or forever()": (
        FailureKind.WORKER_DIED,
        "worker_died: the reward worker closed its connection",
    ),
    "None": (FailureKind.RETURNED_NONE, "returned_none: the reward function returned None"),
    "float('nan')": (FailureKind.RETURNED_NAN, "returned_nan: the reward function returned nan"),
    "-float('inf')": (FailureKind.RETURNED_NAN, "returned_nan: the reward function returned -inf"),
    "{'score': float('nan')}": (FailureKind.RETURNED_NAN, "returned_nan: the reward function returned nan"),
    "'1.0'": (
        FailureKind.RETURNED_WRONG_TYPE,
        "returned_wrong_type: the reward function must return a number, or a dict with 'score'; it is of type str",
    ),
    "[1.0]": (FailureKind.RETURNED_WRONG_TYPE, "returned_wrong_type: the reward function must return a number"),
    "{'acc': 1.0}": (
        FailureKind.RETURNED_WRONG_TYPE,
        "returned_wrong_type: the reward function returned a dict without 'score', with acc",
    ),
    "{'score': 'high'}": (FailureKind.RETURNED_WRONG_TYPE, "returned_wrong_type: the reward function must return"),
}


def _eventually(condition: Callable[[], bool]) -> bool:
    """Whether something becomes true; the limit only ends a test that has failed."""
    deadline = time.monotonic() + LIMIT_S / 5
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed process stays as a zombie until its parent looks, and an orphan's new parent may never look.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_way_to_fail_is_named_and_counted_and_the_others_are_scored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples: list[Sample] = []
    for response in FAILURES:
        samples += [sample("good"), sample(response), sample("good")]
    with caplog.at_level(logging.WARNING), custom_manager(tmp_path, FUNCTION, timeout_s=3.0) as manager:
        scores = score_all(manager, samples)
        metrics = manager.metrics()
        assert _eventually(lambda: all(map(_is_running, manager.worker_pids))), "the dead are replaced"
        workers = manager.worker_pids
    for (response, (_, message)), failed in zip(FAILURES.items(), samples[1::3], strict=True):
        assert failed.reward_failure is not None, response
        assert failed.reward_failure.startswith(message), response
        assert failed.rewards == {"score": -1.0}
    assert scores == [1.0, -1.0, 1.0] * len(FAILURES)
    kinds = [kind for kind, _ in FAILURES.values()]
    assert metrics == {
        "reward/scored": len(samples),
        "reward/failed": len(FAILURES),
        **{f"reward/failed/{kind}": kinds.count(kind) for kind in FailureKind},
    }
    assert not any(map(_is_running, workers)), "closing ends the workers"
    _check_log(caplog)


def _check_log(caplog: pytest.LogCaptureFixture) -> None:
    """One record for each kind of failure and each type of exception, with its traceback."""
    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if "timeout: " in text]) == 1
    assert len([text for text in messages if "worker_died: " in text]) == 1
    assert len([text for text in messages if "exception: " in text]) == 3
    assert len(messages) == 8
    (division,) = (text for text in messages if "ZeroDivisionError" in text)
    assert "Traceback (most recent call last)" in division and "in compute_score" in division
    (timeout,) = (text for text in messages if "timeout: " in text)
    assert "my_reward.py" in timeout and "in forever" in timeout, "where it was stuck"
    assert "row 0 (data_source test) could not be scored and gets -1." in timeout


def test_a_crash_in_c_code_is_logged_with_where_it_stood(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), custom_manager(tmp_path, FUNCTION) as manager:
        score_all(manager, [sample("__import__('ctypes').string_at(0)")])
    (record,) = caplog.records
    assert "killed by SIGSEGV" in record.getMessage() and "in compute_score" in record.getMessage()


def test_a_stopped_worker_takes_what_it_has_started_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    response = f"open({str(pid_file)!r}, 'w').write(str(subprocess.Popen(['sleep', '1000']).pid)) and forever()"
    with custom_manager(tmp_path, FUNCTION, timeout_s=5.0) as manager:
        assert score_all(manager, [sample(response)]) == [-1.0]
    assert _eventually(lambda: not _is_running(int(pid_file.read_text())))


def test_an_idle_worker_that_is_killed_is_replaced_and_nobody_is_blamed(tmp_path: Path) -> None:
    with custom_manager(tmp_path, FUNCTION, num_workers=1) as manager:
        for _ in range(2):
            before = manager.worker_pids
            os.kill(before[0], signal.SIGKILL)
            assert _eventually(lambda: not any(map(_is_running, before)))  # noqa: B023
            assert score_all(manager, [sample("good") for _ in range(3)]) == [1.0] * 3


def test_workers_that_cannot_be_replaced_stop_the_run_instead_of_hanging_it(tmp_path: Path) -> None:
    with custom_manager(tmp_path, FUNCTION, num_workers=1) as manager:
        (tmp_path / "my_reward.py").unlink()
        for text in ("os._exit(1)", "good", "good"):
            manager.submit(sample(text))
        with pytest.raises(RuntimeError, match=r"reward workers cannot be kept running: .*my_reward\.py is not a file"):
            manager.collect()
        manager.submit(sample("good"))
        with pytest.raises(RuntimeError, match="cannot be kept running"):
            manager.collect()


def test_workers_that_die_before_they_get_anything_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        import os, sys, threading, time
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return 1.0
        def functions(frame):
            while frame is not None:
                yield frame.f_code.co_name
                frame = frame.f_back
        def die_when_ready():
            main = threading.main_thread().ident
            while "_serve" not in functions(sys._current_frames()[main]):
                time.sleep(0.01)
            os._exit(5)
        threading.Thread(target=die_when_ready).start()
    """
    lost = "An idle reward worker was lost: the reward worker ended with exit status 5"
    with caplog.at_level(logging.WARNING), custom_manager(tmp_path, source, num_workers=1) as manager:
        # Nothing is submitted before: it might reach a worker in its last moment.
        assert _eventually(lambda: sum(lost in record.getMessage() for record in caplog.records) == 5)
        with pytest.raises(RuntimeError, match="the reward worker ended with exit status 5"):
            score_all(manager, [sample("good")])


ASYNC_FUNCTION = """
import asyncio, os, time

running = most = 0

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global running, most
    running += 1
    most = max(most, running)
    try:
        if solution_str == "together":  # ends only once sixteen have been here
            while most < 16:
                await asyncio.sleep(0.005)
        elif solution_str == "slow":
            await asyncio.sleep(1000)
        elif solution_str == "own timeout":
            await asyncio.wait_for(asyncio.sleep(1000), 0.01)
        elif solution_str == "deaf":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass
        elif solution_str == "block":
            await asyncio.sleep(0.2)
            time.sleep(1000)
        elif solution_str == "exit":
            await asyncio.sleep(0.2)
            os._exit(7)
        elif solution_str == "raise":
            raise SystemExit(2)
        else:
            await asyncio.sleep(float(solution_str))
        return {"score": 1.0}
    finally:
        running -= 1
"""


def test_async_calls_run_at_the_same_time(tmp_path: Path) -> None:
    with custom_manager(tmp_path, ASYNC_FUNCTION, num_workers=1) as manager:
        assert score_all(manager, [sample("together") for _ in range(16)]) == [1.0] * 16


def test_async_failures_hit_only_the_culprit(tmp_path: Path) -> None:
    texts = ["0.01", "slow", "0.3", "own timeout", "raise", "exit", "0.3", "exit", "0.4"]
    samples = [sample(text) for text in texts]
    with custom_manager(tmp_path, ASYNC_FUNCTION, num_workers=1, timeout_s=4.0) as manager:
        assert score_all(manager, samples) == [1, -1, 1, -1, -1, -1, 1, -1, 1]
    failures = [each.reward_failure for each in samples if each.reward_failure]
    assert failures[0] == "timeout: the reward function took longer than 4 s"
    assert failures[1].startswith("exception: TimeoutError")
    assert failures[2] == "exception: SystemExit: 2"
    assert failures[3] == failures[4] == "worker_died: the reward worker ended with exit status 7"


def test_an_async_function_that_blocks_or_ignores_its_limit_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.rewards.process.BLOCKED_LOOP_S", 0.5)
    samples = [sample("0.01"), sample("block"), sample("0.3"), sample("deaf")]
    with custom_manager(tmp_path, ASYNC_FUNCTION, num_workers=2, timeout_s=2.0) as manager:
        assert score_all(manager, samples) == [1, -1, 1, -1]
    assert samples[1].reward_failure == samples[3].reward_failure == "timeout: the reward function took longer than 2 s"


def _trainer_that_waits(folder: Path, response: str) -> subprocess.Popen[str]:
    """A process with two workers, one of them busy with `response`; prints their process ids and then waits."""
    program = f"""
        import time
        from pathlib import Path
        from tests.rewards.samples import custom_manager, sample
        with custom_manager(Path({str(folder)!r}), {FUNCTION!r}, timeout_s=1000) as manager:
            manager.submit(sample({response!r}))
            time.sleep(0.5)
            print(*manager.worker_pids, flush=True)
            time.sleep(1000)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells children of their parent's death on Linux only")
def test_workers_die_with_the_trainer_even_in_an_endless_loop(tmp_path: Path) -> None:
    trainer = _trainer_that_waits(tmp_path, "forever()")
    assert trainer.stdout is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2 and all(map(_is_running, workers))
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert _eventually(lambda: not any(map(_is_running, workers)))


def test_a_trainer_that_ends_without_closing_leaves_nothing_behind_and_says_nothing(tmp_path: Path) -> None:
    program = f"""
        from pathlib import Path
        from megarl.rewards.manager import RewardManager
        from tests.rewards.samples import custom_config, sample
        manager = RewardManager(custom_config(Path({str(tmp_path)!r}), {FUNCTION!r}), [])
        manager.submit(sample("good"))
        print(manager.collect()[0].rewards, *manager.worker_pids)
        manager.submit(sample("forever()"))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 0 and ended.stderr == ""
    assert ended.stdout.startswith("{'score': 1.0} ")
    workers = [int(pid) for pid in ended.stdout.split("} ")[1].split()]
    assert _eventually(lambda: not any(map(_is_running, workers)))


def test_closing_while_responses_are_scored_takes_the_workers_down(tmp_path: Path) -> None:
    with custom_manager(tmp_path, FUNCTION, timeout_s=1000) as manager:
        for _ in range(4):
            manager.submit(sample("forever()"))
        workers = manager.worker_pids
    assert not any(map(_is_running, workers))
    manager.close()  # again: no error
