"""What is drawn again when an engine dies, and in which order things happen; with an engine that is made up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from megarl import platform
from megarl.rollout.engine import EngineDied, FinishReason, Request, Response, SamplingParams, WeightUpdateError
from megarl.rollout.server_engine import ServerEngine
from megarl.rollout.sglang.shared_engine import SharedEngine
from megarl.rollout.sglang_engine import SGLangEngine
from megarl.trainers.engine_keeper import EngineKeeper

SAMPLING = SamplingParams(n=2, max_new_tokens=1, seed=0, stop_token_ids=())
REQUESTS = [Request(request_id=i, prompt_ids=[1], sampling=SAMPLING) for i in range(3)]


class Dying(SharedEngine):
    """Gives a number of responses and dies, as often as it is told to; `log` has what was done to it."""

    def __init__(self, *lives: int) -> None:
        self.lives = list(lives)
        self.log: list[str] = []
        self.dead = False

    @property
    def is_dead(self) -> bool:
        return self.dead

    @property
    def ranks(self) -> range:
        return range(1)

    def generate(self, requests: Sequence[Request]) -> Iterator[Response]:
        self.log.append(f"generate {[request.request_id for request in requests]}")
        left = self.lives.pop(0) if self.lives else 100
        # The last requests first: responses come in no set order.
        for request in reversed(requests):
            for index in range(request.sampling.n):
                if not left:
                    self.dead = True
                    raise EngineDied("killed")
                left -= 1
                yield Response(
                    request_id=request.request_id,
                    index=index,
                    token_ids=[1],
                    logprobs=[0.0],
                    finish_reason=FinishReason.LENGTH,
                    weight_version=0,
                )

    def restart(self) -> None:
        self.dead = False
        self.log.append("restart")

    def sleep(self) -> None:
        self.log.append("sleep")

    def wake(self, parts: Any = ()) -> None:
        self.log.append(f"wake {list(parts)}")


class DyingEngine(Dying, SGLangEngine):
    """Of the run's own."""


class DyingServer(Dying, ServerEngine):
    """A server, which the run has not started."""


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    platform.init_distributed(60)
    yield
    platform.shutdown_distributed()


def keeper_of(engine: DyingEngine, **kwargs: Any) -> EngineKeeper:
    keeper = EngineKeeper(engine, **kwargs)
    keeper.sync(lambda engine: engine.log.append("sync"))
    return keeper


def test_unfinished_requests_are_drawn_again_and_each_response_comes_once() -> None:
    engine = DyingEngine(3, 1)
    responses = list(keeper_of(engine, max_restarts=2).generate(REQUESTS))
    assert sorted((r.request_id, r.index) for r in responses) == [(i, j) for i in range(3) for j in range(2)]
    assert engine.log == [
        "sync",
        "generate [0, 1, 2]",
        "restart",
        "sync",
        # Of request 1 a response was there, and of 2 both.
        "generate [0, 1]",
        "restart",
        "sync",
        "generate [0, 1]",
    ]


def test_deaths_beyond_the_limit_end_the_run_with_their_cause() -> None:
    with pytest.raises(EngineDied, match=r"rank 0 died: killed\nno restart is left of rollout\.max_engine_restarts"):
        list(keeper_of(DyingEngine(1, 1), max_restarts=1).generate(REQUESTS))


def test_a_server_that_dies_ends_the_run_with_its_cause_whatever_restarts_are_left() -> None:
    with pytest.raises(EngineDied, match=r"rank 0 died: killed\nstart that server again with launch/engine\.py"):
        list(EngineKeeper(DyingServer(1), max_restarts=5).generate(REQUESTS))


def test_a_sync_that_fails_on_a_living_engine_is_raised() -> None:
    engine = DyingEngine()

    def fails(_: Any) -> None:
        raise WeightUpdateError("model.norm.weight arrived changed")

    with pytest.raises(WeightUpdateError, match="arrived changed"):
        EngineKeeper(engine, max_restarts=5).sync(fails)
    assert engine.log == []


def test_memory_comes_back_in_stages_around_the_sync() -> None:
    engine = DyingEngine()
    keeper = keeper_of(engine, sleeps=True)
    assert engine.log == ["sleep", "wake ['weights']", "sync", "wake ['kv_cache']"]
    assert not keeper.is_asleep
    keeper.sleep()
    assert keeper.is_asleep


def test_an_engine_that_dies_asleep_ends_the_run_with_what_it_died_of() -> None:
    class DiesAsleep(DyingEngine):
        def wake(self, parts: Any = ()) -> None:
            self.dead = True
            raise EngineDied("its server process was ended by SIGKILL")

    def fails(_: Any) -> None:
        raise WeightUpdateError("the engine's weights are asleep")

    with pytest.raises(EngineDied, match=r"rank 0 died: its server process was ended by SIGKILL\nno restart is left"):
        EngineKeeper(DiesAsleep(), sleeps=True).sync(fails)
