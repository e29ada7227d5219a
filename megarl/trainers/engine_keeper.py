"""An engine over the steps of a run: it sleeps while the trainer works, and is started again when it dies."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from megarl.rollout.engine import Engine, EngineDied, MemoryPart, Request, Response, WeightUpdateError
from megarl.rollout.sglang.shared_engine import SharedEngine
from megarl.rollout.sglang_engine import SGLangEngine
from megarl.weights.bucket_stream import Traffic


class EngineKeeper:
    """This rank's engine, or its part of one. What it does is collective over the world, except for `close`."""

    def __init__(self, engine: Engine, *, sleeps: bool = False, max_restarts: int = 0) -> None:
        """Args:
        sleeps: the engine gives its memory back between a rollout and the sync that follows it.
        max_restarts: how often engines that died are started again, over the run.
        """
        self.engine = engine
        self.is_asleep = False
        """Whether the engine needs a `sync` before it generates."""
        self._sleeps = sleeps
        self._restarts_left = max_restarts
        self._give: Callable[[Engine], Traffic] | None = None
        self._death: str | None = None
        """What the engine died of, where that showed between the points at which ranks meet."""
        self.sleep()

    @property
    def size(self) -> int:
        """Ranks that form the engine, or share it."""
        return len(self.engine.ranks) if isinstance(self.engine, SharedEngine) else 1

    # Memory, in stages: weights, then their update, then the KV cache, so that never more than one of them is new.

    def sleep(self) -> None:
        """Gives the engine's memory to the trainer, until the next `sync`."""
        if self._sleeps:
            self.is_asleep = True
            with self._death_told_later():
                self.engine.sleep()

    def sync(self, give: Callable[[Engine], Traffic]) -> Traffic:
        """Wakes the engine and gives it weights.

        Args:
            give: gives an awake engine the weights, as `sync_weights` does, and raises on all ranks or on none. It is
                kept, and called again when an engine that died has been started again.

        Raises:
            WeightUpdateError: on every rank, with tensor, rank and cause.
        """
        self._give = give
        while True:
            try:
                self._wake("weights")
                traffic = give(self.engine)
                self._wake("kv_cache")
            except WeightUpdateError as error:
                if not self._revive(str(error)):
                    raise
            else:
                self.is_asleep = False
                return traffic

    def _wake(self, part: MemoryPart) -> None:
        if self._sleeps:
            with self._death_told_later():
                self.engine.wake([part])

    @contextlib.contextmanager
    def _death_told_later(self) -> Iterator[None]:
        """What follows, sync or generation, tells all ranks: raised here, it would end one of them alone."""
        try:
            yield
        except EngineDied as error:
            self._death = self._death or str(error)

    # Generation

    def generate(self, requests: Sequence[Request]) -> Iterator[Response]:
        """Generates all responses of this rank's requests, whichever engines die meanwhile.

        Every rank has to exhaust the iterator: at its end the ranks tell one another whose engine died. These are
        started again, all engines get the weights again, and what is unfinished is drawn again.

        Raises:
            EngineDied: on every rank; engines died more often than they may, or one that the run has not started.
        """
        if not isinstance(self.engine, SharedEngine):
            yield from self.engine.generate(requests)
            return
        finished: set[tuple[int, int]] = set()
        while True:
            cause = "an engine died"
            try:
                for response in self.engine.generate(requests):
                    key = (response.request_id, response.index)
                    if key not in finished:
                        finished.add(key)
                        yield response
            except EngineDied as error:
                cause = str(error)
            if not self._revive(cause):
                return
            assert self._give is not None, "engines generate after a sync"
            self.sync(self._give)
            # A request is drawn again whole, and those of its responses that are there are kept.
            requests = [
                request
                for request in requests
                if any((request.request_id, index) not in finished for index in range(request.sampling.n))
            ]

    def _revive(self, cause: str) -> bool:
        """Starts engines that died again; whether there were any.

        Args:
            cause: what this rank knows of it.

        Raises:
            EngineDied: on every rank; there were, and no restart is left.
        """
        if not isinstance(self.engine, SharedEngine):
            return False
        causes: list[str | None] = [None] * dist.get_world_size()
        # What a dead engine cannot do afterwards says less than what it died of.
        dist.all_gather_object(causes, (self._death or cause) if self.engine.is_dead else None)
        dead = {rank: text for rank, text in enumerate(causes) if text is not None}
        if not dead:
            return False
        rank, text = next(iter(dead.items()))
        story = f"the engine of rank {rank} died: {text}"
        if not isinstance(self.engine, SGLangEngine) or not self._restarts_left:
            raise EngineDied(f"{story}\n{self.engine.after_death}")
        self._restarts_left -= 1
        if dist.get_rank() == 0:
            print(
                f"warning: {story}\nit is started again, and what it had not finished is drawn again", file=sys.stderr
            )
        if not dead.keys().isdisjoint(self.engine.ranks):
            self.engine.restart()
            self._death = None
        return True

    def close(self) -> None:
        """Ends the engine's processes, where it has some."""
        if isinstance(self.engine, SharedEngine):
            self.engine.close()
