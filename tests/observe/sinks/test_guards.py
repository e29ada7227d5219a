"""A sink that fails, is slow or never answers costs its own metrics and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import pytest

from megarl.observe.sinks import BackgroundSink, GuardedSink, background

PATIENCE_S = 120.0


class _Sink:
    """Takes metrics while `works` says so."""

    def __init__(self, works: Callable[[int], bool] = lambda step: True) -> None:
        self.works = works
        self.steps: list[int] = []
        self.attempts: list[int] = []
        self.closed_as_failed: bool | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.attempts.append(step)
        if not self.works(step):
            raise ConnectionError("the server is away.\nsecond line of a long message")
        self.steps.append(step)

    def close(self, *, failed: bool) -> None:
        self.closed_as_failed = failed


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def _background(sink: _Sink, said: list[str]) -> BackgroundSink:
    return BackgroundSink("mlflow", lambda: sink, said.append, first_wait_s=0.001)


def test_a_sink_that_fails_is_told_once_and_counted_at_the_end() -> None:
    sink, said = _Sink(lambda step: step not in (2, 3)), []
    guarded = GuardedSink("jsonl", sink, said.append)
    for step in range(1, 6):
        guarded.log(step, {"actor/lr": 0.1})
    assert sink.steps == [1, 4, 5]
    (warning,) = said
    assert "jsonl did not take the metrics of step 2 (ConnectionError: the server is away)" in warning
    guarded.close(failed=False)
    assert "jsonl is without 2 logging(s)" in said[-1]


def test_a_sink_that_cannot_be_closed_is_a_warning() -> None:
    class Unclosable(_Sink):
        def close(self, *, failed: bool) -> None:
            raise OSError("No space left on device")

    said: list[str] = []
    GuardedSink("jsonl", Unclosable(), said.append).close(failed=False)
    background_sink = _background(Unclosable(), said)
    background_sink.log(1, {})
    background_sink.close(failed=False)
    assert [line.split(" (")[0] for line in said] == [
        "warning: jsonl could not be closed",
        "warning: mlflow could not be closed",
    ]


@pytest.mark.parametrize("failed", [False, True])
def test_closing_sends_what_waits_and_hands_on_how_the_run_ended(failed: bool) -> None:
    sink, said = _Sink(), []
    background_sink = _background(sink, said)
    for step in range(200):
        background_sink.log(step, {"actor/lr": 0.1})
    background_sink.close(failed=failed)
    assert sink.steps == list(range(200))
    assert sink.closed_as_failed is failed
    assert said == []


def test_logging_does_not_wait_for_a_sink_that_does_not_answer() -> None:
    answer, sink, said = threading.Event(), _Sink(lambda step: answer.wait(PATIENCE_S)), []
    background_sink = _background(sink, said)
    for step in range(1, 4):
        background_sink.log(step, {})  # would hang here
    assert sink.steps == []
    background_sink.close(failed=False, timeout_s=0.05)
    assert "mlflow did not come to its end within 0.05 s" in said[-1]
    answer.set()
    _wait_for(lambda: sink.closed_as_failed is False)


def test_a_server_that_comes_back_gets_every_step_in_order() -> None:
    sink, said = _Sink(lambda step: len(sink.attempts) > 3), []
    background_sink = _background(sink, said)
    for step in range(1, 4):
        background_sink.log(step, {})
    _wait_for(lambda: len(sink.steps) == 3)
    background_sink.close(failed=False)
    assert sink.attempts == [1, 1, 1, 1, 2, 3]
    assert sink.steps == [1, 2, 3]
    assert len(said) == 1


def test_connecting_is_tried_again_too() -> None:
    sink, said, attempts = _Sink(), [], []

    def connect() -> _Sink:
        attempts.append(None)
        if len(attempts) < 3:
            raise TimeoutError("no route to host")
        return sink

    background_sink = BackgroundSink("wandb", connect, said.append, first_wait_s=0.001)
    background_sink.log(1, {})
    _wait_for(lambda: sink.steps == [1])
    background_sink.close(failed=False)
    assert len(said) == 1 and "wandb did not take the metrics of step 1 (TimeoutError: no route to host)" in said[0]


def test_metrics_that_a_server_never_takes_do_not_hold_up_the_rest() -> None:
    sink, said = _Sink(lambda step: step != 2), []
    background_sink = _background(sink, said)
    for step in range(1, 5):
        background_sink.log(step, {})
    _wait_for(lambda: sink.steps == [1, 3, 4])
    background_sink.close(failed=False)
    assert sink.attempts.count(2) == background.ATTEMPTS
    assert "mlflow is without 1 logging(s) of metrics; last it failed with ConnectionError" in said[-1]


def test_a_queue_that_is_full_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "QUEUE_LENGTH", 3)
    begun, answer, sink, said = threading.Event(), threading.Event(), _Sink(), []

    def works(step: int) -> bool:
        begun.set()
        return answer.wait(PATIENCE_S)

    sink.works = works
    background_sink = _background(sink, said)
    background_sink.log(1, {})
    assert begun.wait(PATIENCE_S)
    for step in range(2, 8):
        background_sink.log(step, {})
    answer.set()
    background_sink.close(failed=False)
    assert sink.steps == [1, 5, 6, 7]
    assert "mlflow is without 3 logging(s)" in said[-1]


def test_a_server_that_is_away_at_the_end_is_asked_once_for_each_step_and_no_more() -> None:
    sink, said = _Sink(lambda step: False), []
    background_sink = BackgroundSink("mlflow", lambda: sink, said.append, first_wait_s=PATIENCE_S)
    for step in range(1, 4):
        background_sink.log(step, {})
    _wait_for(lambda: sink.attempts == [1])
    background_sink.close(failed=False)
    assert sink.attempts == [1, 1, 2, 3]
    assert "mlflow is without 3 logging(s)" in said[-1]
