"""Which responses run and which wait: continuous batching over a fixed number of slots.

A finished response's slot goes to a waiting one before the next decoding step, so that steps stay full until nothing
waits; after that the running ones close up, so that a step costs as much as they need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy

from megarl.rollout.engine import FinishReason, Request, Response
from megarl.rollout.kv_cache import Prefix, SlotCache
from megarl.rollout.sampling import stream_keys

PREFILL_TOKENS = 4096
"""Tokens, padding included, of one prefill of several prompts; bounds its activations. A longer prompt runs alone."""


@dataclass(slots=True)
class Running:
    """A response that occupies a slot."""

    request: Request
    index: int
    key: numpy.uint64
    """Of its random numbers."""
    slot: int = -1
    """Its place in the cache; -1 while it waits."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed_experts: list[numpy.ndarray] = field(default_factory=list)
    """int16 [tokens, mixtures, top-k] parts of the tokens so far, the newest left out; empty where not recorded."""

    @property
    def position(self) -> int:
        """Of its newest token, in prompt and response: where the next step puts that token's keys and values."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def append(self, token: int, logprob: float) -> FinishReason | None:
        """Adds a token; says why the response is finished, if it is."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.request.sampling.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) == self.request.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def finished(self, reason: FinishReason, weight_version: int) -> Response:
        return Response(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=reason,
            weight_version=weight_version,
            routed_experts=self._all_routed_experts(),
        )

    def _all_routed_experts(self) -> numpy.ndarray | None:
        """Of prompt and response. The newest token was sampled and not computed: -1."""
        if not self.routed_experts:
            return None
        newest = numpy.full((1, *self.routed_experts[0].shape[1:]), -1, dtype=numpy.int16)
        return numpy.concatenate([*self.routed_experts, newest])


class Waiting:
    """Responses that have not started, those with the longest prompts first: a prefill then pads little, and the slots
    of a step are of about one length."""

    def __init__(self, requests: Sequence[Request]) -> None:
        ordered = sorted(requests, key=lambda request: -len(request.prompt_ids))
        self._responses = deque(
            Running(request, index, key)
            for request in ordered
            for index, key in enumerate(
                stream_keys([request.sampling.seed] * request.sampling.n, range(request.sampling.n))
            )
        )
        self._prefixes: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._responses)

    def prompts_to_prefill(self, free: int) -> list[Request]:
        """The prompts of the next `free` responses that have no prefix yet, within one prefill's tokens."""
        prompts: dict[int, Request] = {}
        width = 0
        for response, _ in zip(self._responses, range(free), strict=False):
            request = response.request
            if request.request_id in self._prefixes or request.request_id in prompts:
                continue
            width = max(width, len(request.prompt_ids))
            if prompts and width * (len(prompts) + 1) > PREFILL_TOKENS:
                break
            prompts[request.request_id] = request
        return list(prompts.values())

    def add_prefixes(self, requests: Sequence[Request], prefixes: Sequence[Prefix]) -> None:
        for request, prefix in zip(requests, prefixes, strict=True):
            self._prefixes[request.request_id] = prefix

    def pop(self) -> tuple[Running, Prefix] | None:
        """The next response, if its prompt has been prefilled. A prefix is let go with the last one that needs it."""
        if not self._responses or self._responses[0].request.request_id not in self._prefixes:
            return None
        response = self._responses.popleft()
        request = response.request
        if response.index == request.sampling.n - 1:
            return response, self._prefixes.pop(request.request_id)
        return response, self._prefixes[request.request_id]

    def drain(self) -> list[Running]:
        """Takes out everything that has not started."""
        rest = list(self._responses)
        self._responses.clear()
        self._prefixes.clear()
        return rest


class Slots:
    """The running responses and their place in the cache."""

    def __init__(self, count: int, make_cache: Callable[[Prefix, int], SlotCache]) -> None:
        """All free.

        Args:
            make_cache: gives a cache like a prefix, with so many slots; called with the first response.
        """
        self._held: list[Running | None] = [None] * count
        self._make_cache = make_cache
        self._cache: SlotCache | None = None

    @property
    def cache(self) -> SlotCache:
        """Once something has started."""
        assert self._cache is not None
        return self._cache

    @property
    def free(self) -> int:
        return self._held.count(None)

    def start(self, response: Running, prefix: Prefix) -> None:
        """Puts a response into the lowest free slot."""
        if self._cache is None:
            self._cache = self._make_cache(prefix, len(self._held))
        slot = self._held.index(None)
        self._held[slot] = response
        response.slot = slot
        self.cache.start(slot, prefix)

    def finish(self, response: Running) -> None:
        """Frees a response's slot."""
        self._held[response.slot] = None

    def close_up(self) -> list[Running]:
        """Moves the last responses into free slots before them; returns all, by slot."""
        running = [response for response in self._held if response is not None]
        holes = [slot for slot in range(len(running)) if self._held[slot] is None]
        beyond = [response for response in running if response.slot >= len(running)]
        for slot, response in zip(holes, beyond, strict=True):
            self.cache.move(response.slot, slot, response.position)
            self._held[response.slot] = None
            self._held[slot] = response
            response.slot = slot
        return [response for response in self._held if response is not None]

    def drain(self) -> list[Running]:
        """Takes out everything that runs."""
        rest = [response for response in self._held if response is not None]
        self._held = [None] * len(self._held)
        return rest
