"""What all tests of sinks need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.observe.sinks import BackgroundSink
from tests.launch import LIMIT_S


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """The end of a run waits for its trackers however slow the machine is: what comes too late is lost on purpose."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BackgroundSink.close.__kwdefaults__, "timeout_s", LIMIT_S / 5)
        yield
