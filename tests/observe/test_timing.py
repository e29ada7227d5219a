"""Timers, on a clock that the test turns."""

from __future__ import annotations

import pytest

from megarl.observe import Timers, timing


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_phases_add_up_and_an_outer_phase_contains_the_inner_ones(clock: _Clock) -> None:
    timers = Timers()
    with timers("step"):
        with timers("gen"):
            clock.now += 3
        clock.now += 1
        with timers("gen"):
            clock.now += 2
    assert timers.flush() == {"timing_s/gen": 5.0, "timing_s/step": 6.0}


def test_a_flush_starts_again_and_a_running_phase_is_told_when_it_ends(clock: _Clock) -> None:
    timers = Timers()
    with timers("testing"):
        with timers("gen"):
            clock.now += 1
        assert timers.flush() == {"timing_s/gen": 1.0}
        clock.now += 2
    assert timers.flush() == {"timing_s/testing": 3.0}
    assert timers.flush() == {}


def test_a_phase_that_fails_has_its_time_and_can_run_again(clock: _Clock) -> None:
    timers = Timers()
    with pytest.raises(RuntimeError, match="out of memory"), timers("gen"):
        clock.now += 4
        raise RuntimeError("out of memory")
    with timers("gen"):
        clock.now += 1
    assert timers.flush() == {"timing_s/gen": 5.0}


def test_a_phase_within_itself_is_refused() -> None:
    timers = Timers()
    with timers("gen"), pytest.raises(ValueError, match="'gen' is being timed already"), timers("gen"):
        pass


@pytest.mark.parametrize(("synchronize", "waits"), [(True, 2), (False, 0)])
def test_the_device_is_waited_for_at_both_ends_of_a_phase(
    monkeypatch: pytest.MonkeyPatch, synchronize: bool, waits: int
) -> None:
    waited: list[None] = []
    monkeypatch.setattr(timing, "synchronize", lambda: waited.append(None))
    with Timers(synchronize=synchronize)("gen"):
        pass
    assert len(waited) == waits


def test_after_a_failure_the_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_device() -> None:
        if failed:
            raise RuntimeError("a second error, which would hide the first")

    failed: list[None] = []
    monkeypatch.setattr(timing, "synchronize", broken_device)
    with pytest.raises(ZeroDivisionError), Timers()("gen"):
        failed.append(None)
        raise ZeroDivisionError
