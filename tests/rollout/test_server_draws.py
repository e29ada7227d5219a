"""How an engine's server asks SGLang, which a stand-in plays here, for the responses to one prompt."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megarl.rollout.sglang.messages import Abort, Draw, Drawn, decode, encode
from megarl.rollout.sglang.server import Server
from tests.launch import LIMIT_S

LIMIT = "max_new_tokens"


class Manager:
    """SGLang's, as far as the server uses it to generate: answers at once, but for prompts while they are held."""

    def __init__(self, *, caches: bool, holds_prompts: bool = False) -> None:
        self.server_args = SimpleNamespace(disable_radix_cache=not caches)
        self.asked: list[tuple[list[int], int]] = []
        self.done: list[tuple[list[int], int]] = []
        self._free = asyncio.Event()
        if not holds_prompts:
            self._free.set()

    async def generate_request(self, request: Any, _: None) -> AsyncIterator[dict[str, Any]]:
        what = (request.input_ids, request.sampling_params[LIMIT])
        self.asked.append(what)
        if what[1] == 0:
            await self._free.wait()
        self.done.append(what)
        yield {
            "output_ids": [7] * what[1],
            "meta_info": {"output_token_logprobs": [(-1.0, 7, None)] * what[1], "finish_reason": {"type": "length"}},
        }

    def abort_request(self, *, abort_all: bool) -> None:
        assert abort_all
        self._free.set()


@pytest.fixture(autouse=True)
def io_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.managers.io_struct")
    module.GenerateReqInput = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@contextmanager
def serving(manager: Manager) -> Iterator[Connection]:
    """A rank's end of the connection to a server."""
    mine, its = Pipe()
    server = Server(SimpleNamespace(tokenizer_manager=manager), its)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        yield mine
    finally:
        mine.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def draw(key: int, prompt: list[int]) -> Draw:
    return Draw(key=key, prompt_ids=prompt, sampling={LIMIT: 2}, is_cut=False, routed_experts=False)


def responses(connection: Connection, count: int) -> dict[int, Drawn]:
    found: dict[int, Drawn] = {}
    while len(found) < count:
        assert connection.poll(LIMIT_S)
        for message in decode(connection.recv_bytes()):
            assert isinstance(message, Drawn)
            found[message.key] = message
    return found


def test_a_prompt_with_several_responses_is_computed_once_before_them() -> None:
    manager = Manager(caches=True)
    with serving(manager) as connection:
        connection.send_bytes(encode([draw(0, [1, 2]), draw(1, [3]), draw(2, [1, 2]), draw(3, [1, 2])]))
        found = responses(connection, 4)
    assert all(drawn.token_ids == [7, 7] and drawn.finish_reason == "length" for drawn in found.values())
    of_the_first = [what for what in manager.done if what[0] == [1, 2]]
    assert of_the_first == [([1, 2], 0), *[([1, 2], 2)] * 3]
    assert [what for what in manager.done if what[0] == [3]] == [([3], 2)]


def test_without_a_cache_nothing_is_computed_before() -> None:
    manager = Manager(caches=False)
    with serving(manager) as connection:
        connection.send_bytes(encode([draw(0, [1, 2]), draw(1, [1, 2])]))
        responses(connection, 2)
    assert manager.asked == [([1, 2], 2)] * 2


def test_responses_whose_prompt_is_still_computed_are_aborted_too() -> None:
    manager = Manager(caches=True, holds_prompts=True)
    with serving(manager) as connection:
        connection.send_bytes(encode([draw(0, [1, 2]), draw(1, [1, 2])]))
        connection.send_bytes(encode([Abort()]))
        found = responses(connection, 2)
    assert all(drawn.token_ids == [] and drawn.finish_reason == "abort" for drawn in found.values())
    assert ([1, 2], 2) not in manager.asked
