"""Whatever comes to a server's port, the server goes on: what is no run is sent away, the next run is served."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from megarl.rollout.sglang import listener
from megarl.rollout.sglang.channel import STARTED
from megarl.rollout.sglang.messages import Answer, Hello, decode, encode
from megarl.rollout.sglang.sockets import as_connection
from tests.launch import LIMIT_S

FACTS = {"model.dtype": "float32"}


def framed(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(listener, "_HELLO_LIMIT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        framed(b"[" * 100_000),
        framed(b"[]"),
        framed(b'[["Abort", {}]]'),
        framed(json.dumps([["Hello", {"facts": 5}]]).encode()),
        struct.pack("!i", 1000) + b"a part, and then nothing",
    ],
)
def test_a_stranger_is_sent_away_and_the_run_after_it_is_served(
    port: socket.socket, capsys: pytest.CaptureFixture[str], sent: bytes
) -> None:
    address = port.getsockname()
    served: list[str] = []
    thread = threading.Thread(target=lambda: served.append(listener.next_run(port, FACTS)[1]), daemon=True)
    thread.start()
    with socket.create_connection(address) as stranger, socket.create_connection(address) as peer:
        stranger.sendall(sent)
        run = as_connection(peer)
        run.send_bytes(encode([Hello(facts=FACTS)]))
        assert run.poll(LIMIT_S), "the run got no answer"
        assert decode(run.recv_bytes()) == [Answer(number=STARTED, problem=None)]
        run.close()
    thread.join(LIMIT_S)
    assert len(served) == 1
    assert "it is no run" in capsys.readouterr().out


def test_a_run_may_say_nothing_for_longer_than_its_greeting_may_take(port: socket.socket) -> None:
    with socket.create_connection(port.getsockname()) as peer:
        run = as_connection(peer)
        run.send_bytes(encode([Hello(facts=FACTS)]))
        connection, _ = listener.next_run(port, FACTS)

        def speak_late() -> None:
            time.sleep(1.5)
            run.send_bytes(b"late")

        threading.Thread(target=speak_late, daemon=True).start()
        assert connection.recv_bytes() == b"late"
        connection.close()
        run.close()
