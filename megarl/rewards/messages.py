"""What travels between the trainer and a reward worker, over a socket of their own.

Not over stdin and stdout: reward functions print. Not through multiprocessing: its children import the parent's main
module again, and with it torch.
"""

from __future__ import annotations

import pickle
import socket
from dataclasses import dataclass
from typing import Any

from megarl.rewards.outcome import Outcome

HEADER_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The first message to a worker: what it will score with."""

    custom_path: str | None
    custom_name: str
    graders: tuple[str, ...]
    """Graders to import before the first response, whose time limit the import would eat up."""
    timeout_s: float
    """For async functions; others are stopped from outside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker's first message."""

    concurrency: int
    """Responses it can score at once: 1, or more for an async function."""
    problem: str | None = None
    """Why it cannot score at all; it has ended then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One response to score."""

    number: int
    grader: str | None
    """None for a function of the user's own."""
    arguments: dict[str, Any]
    """What the function is called with, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What became of a job."""

    number: int
    outcome: Outcome


def frame(message: object) -> bytes:
    """A message with its length before it."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def payload_size(header: bytes) -> int:
    return int.from_bytes(header, "big")


def unpack(payload: bytes) -> Any:
    return pickle.loads(payload)


def receive(connection: socket.socket) -> Any | None:
    """The next message, waiting for it; None when the other side has gone."""
    header = _receive_exactly(connection, HEADER_BYTES)
    payload = header and _receive_exactly(connection, payload_size(header))
    return unpack(payload) if payload else None


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)
