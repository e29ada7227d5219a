"""The group over which weights reach a server: bytes come as they were sent, and nobody waits without an end."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.rollout.sglang import update_group
from megarl.rollout.sglang.update_group import UpdateGroup, join, open_store

CPU = torch.device("cpu")


def in_thread(target: object, *args: object) -> tuple[threading.Thread, list[object]]:
    """Runs it beside the test; the list gets what it returns or raises."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(target(*args))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_every_receiver_has_the_bytes_of_the_sender() -> None:
    store = open_store("127.0.0.1", 60.0)
    receivers = [
        in_thread(lambda rank: join("127.0.0.1", store.port, rank, 3, "gloo").receive(1000), r) for r in (1, 2)
    ]
    sender = UpdateGroup(store, 0, 3, backend="gloo", device=CPU, limit_s=60.0)
    data = torch.randint(256, (1000,), dtype=torch.uint8)
    sender.wait(sender.broadcast(data))
    for thread, received in receivers:
        thread.join(60.0)
        assert torch.equal(received[0], data)


def test_a_receiver_that_does_not_come_is_waited_for_as_long_as_was_said() -> None:
    with pytest.raises(RuntimeError):
        UpdateGroup(open_store("127.0.0.1", 0.5), 0, 2, backend="gloo", device=CPU, limit_s=0.5)


def test_a_receiver_waits_for_bytes_as_long_as_the_sender_said() -> None:
    store = open_store("127.0.0.1", 0.5)
    thread, received = in_thread(lambda: join("127.0.0.1", store.port, 1, 2, "gloo").receive(10))
    sender = UpdateGroup(store, 0, 2, backend="gloo", device=CPU, limit_s=60.0)
    thread.join(60.0)
    assert isinstance(received[0], RuntimeError)
    sender.abort()


def test_a_sender_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_group, "_FIND_LIMIT_S", 0.5)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    port = store.port
    del store
    with pytest.raises(RuntimeError):
        join("127.0.0.1", port, 1, 2, "gloo")
