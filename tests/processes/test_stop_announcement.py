"""What a run says when it is asked to stop is true whoever asks."""

from __future__ import annotations

import signal

import pytest

from tests.processes.test_stop_signals import LONG_S, listening

FAILED = "unless torchrun sent it because a rank has failed"


@pytest.mark.parametrize(("number", "may_come_from_torchrun"), [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_only_the_signal_that_torchrun_ends_ranks_with_may_mean_a_failure(
    number: signal.Signals, may_come_from_torchrun: bool
) -> None:
    with listening(LONG_S) as (process, _):
        process.send_signal(number)
        line = process.stderr.readline()
    assert line.startswith(f"{number.name}: the run ends after this step, with a checkpoint")
    assert (FAILED in line) == may_come_from_torchrun
