"""A connection to what runs SGLang, as a rank uses it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from megarl.rollout.engine import EngineDied
from megarl.rollout.sglang.messages import Abort, Answer, Call, Draw, Drawn, Message, Refused, decode, encode

STARTED = 0
"""Number of the `Answer` that comes without a call."""


class Channel(ABC):
    """Asks for responses and for things to be done. One thread uses it, except for `abort`."""

    name = "its server process"
    """What is on the other side, in an error."""

    def __init__(self, connection: Connection, answer_limit_s: float | None = None) -> None:
        """Args:
        answer_limit_s: seconds that a call may take; None: as long as the other side lives.
        """
        self._connection = connection
        self._answer_limit_s = answer_limit_s
        self._sending = threading.Lock()
        self._calls = STARTED
        self._drawn: deque[Drawn | Refused] = deque()
        self._answers: dict[int, Answer] = {}

    def draw(self, draws: Sequence[Draw]) -> None:
        """Asks for responses; `next_drawn` gives them as they finish."""
        self._send(draws)

    def next_drawn(self) -> Drawn | Refused:
        """Waits for the next response.

        Raises:
            EngineDied: there will be none.
        """
        while not self._drawn:
            self._receive()
        return self._drawn.popleft()

    def abort(self) -> None:
        """Ends all responses soon. Any thread may call it."""
        self._send([Abort()])

    def call(self, method: str, **arguments: Any) -> str | None:
        """Has the server do one thing (`server.Server`) and waits for it; what went wrong, if anything did.

        Raises:
            EngineDied: the server is gone, or did not answer in time.
        """
        return self.answer(self.begin_call(method, **arguments))

    def begin_call(self, method: str, **arguments: Any) -> int:
        """As `call`, but waits for nothing: `answer` of the number that it gives does."""
        self._calls += 1
        self._send([Call(number=self._calls, method=method, arguments=arguments)])
        return self._calls

    def answer(self, number: int, if_silent: str = "") -> str | None:
        """Waits for the outcome of a call.

        Args:
            if_silent: what an error adds where none comes.

        Raises:
            EngineDied: the server is gone, or did not answer in time.
        """
        limit = self._answer_limit_s
        deadline = None if limit is None else time.monotonic() + limit
        while number not in self._answers:
            if deadline is not None and not self._connection.poll(max(deadline - time.monotonic(), 0)):
                raise EngineDied(f"{self.name} did not answer within {limit:g} s{if_silent}")
            self._receive()
        return self._answers.pop(number).problem

    def close(self) -> None:
        """Ends the connection, and with it what the server does for it."""
        self._connection.close()

    @abstractmethod
    def _lost(self) -> EngineDied:
        """What to raise where the connection has ended."""

    def _send(self, messages: Sequence[Message]) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(encode(messages))
        except OSError:
            raise self._lost() from None

    def _receive(self) -> None:
        """Reads what comes next, and puts it by."""
        try:
            messages = decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._lost() from None
        for message in messages:
            if isinstance(message, Answer):
                self._answers[message.number] = message
            else:
                self._drawn.append(message)
