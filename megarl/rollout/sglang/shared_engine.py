"""What every SGLang engine is to its ranks, wherever it runs."""

from __future__ import annotations

import base64
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch.distributed as dist

from megarl.rollout.engine import (
    Engine,
    EngineDied,
    FinishReason,
    MemoryPart,
    Request,
    Response,
    WeightUpdateError,
)
from megarl.rollout.parameters import checkpoint_shapes
from megarl.rollout.sglang.channel import Channel
from megarl.rollout.sglang.messages import Draw, Drawn, Refused
from megarl.rollout.sglang.options import EngineSettings
from megarl.rollout.sglang.placement import Placement
from megarl.rollout.sglang.sampling import is_cut_off, kept_tokens
from megarl.weights.bucket import Bucket

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_ROUTER = re.compile(r"\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.gate\.weight$")
_NAMES_SHOWN = 3
"""Of missing tensors, in an error."""
_DIED = "died:"


def group_of(placement: Placement) -> dist.ProcessGroup | None:
    """The gloo group of the ranks that share an engine; None for one alone. Collective over the world."""
    size = placement.size
    if size == 1:
        return None
    # gloo, since what goes over it are small objects; every rank takes part in making every group.
    starts = range(0, dist.get_world_size(), size)
    return [dist.new_group(range(first, first + size), backend="gloo") for first in starts][placement.engine]


class SharedEngine(Engine):
    """Generates with SGLang, for the ranks that share it; an `Engine`.

    Every one of these ranks has such an object and calls the same methods in the same order, except for `generate` and
    `abort`: the first rank's answers, the others' `generate` has nothing to do.
    """

    after_death: str
    """What a person is told where the engine has died and is not started again."""

    def __init__(self, settings: EngineSettings, placement: Placement, group: dist.ProcessGroup | None) -> None:
        """Starts nothing.

        Args:
            group: a gloo group of the engine's ranks; None if there is one rank.
        """
        self._settings, self._placement, self._group = settings, placement, group
        self._shapes = checkpoint_shapes(settings.model_path)
        self._layers = 1 + max(int(match[1]) for name in self._shapes if (match := _LAYER.search(name)))
        self._mixtures = sorted(int(match[1]) for name in self._shapes if (match := _ROUTER.search(name)))
        self._received: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        """As an engine is that has just been started: awake, without weights."""
        self._weight_version: int | None = None
        self._next_version: int | None = None
        self._asleep: set[MemoryPart] = set()
        self._generating = self._paused = self._is_dead = False

    @property
    @abstractmethod
    def _channel(self) -> Channel | None:
        """To the engine, on the first rank."""

    @abstractmethod
    def close(self) -> None:
        """Ends what this rank has started, or leaves what it uses."""

    @property
    def weight_version(self) -> int | None:
        return self._weight_version

    @property
    def ranks(self) -> range:
        """Those that are this engine."""
        return self._placement.ranks

    @property
    def is_dead(self) -> bool:
        """Whether this rank knows that the engine is gone."""
        return self._is_dead

    # Generation

    def generate(self, requests: Sequence[Request]) -> Iterator[Response]:
        """See `Engine.generate`. Generation runs beside the iterator.

        Raises:
            EngineDied: while the iterator is advanced; what it has yielded by then is good.
        """
        if self._is_dead:
            raise EngineDied("its processes ended before this")
        if self._asleep:
            raise RuntimeError(f"the engine sleeps ({', '.join(sorted(self._asleep))}): wake it before generating")
        if self._weight_version is None:
            raise RuntimeError("the engine has no complete weights: update them before generating")
        self._refuse_if_generating()
        if not self._placement.is_leader:
            if requests:
                raise ValueError(
                    f"requests came to rank {self._placement.rank}, but its engine's are answered by rank "
                    f"{self._placement.first_rank}"
                )
            return iter(())
        self._check(requests)
        return self._run(list(requests))

    def abort(self) -> None:
        """See `Engine.abort`."""
        if self._channel is not None:
            self._channel.abort()

    def pause(self) -> None:
        """Holds the running `generate` where it is, so that weights can be updated in its middle.

        Responses are taken back into the queue: their keys and values will be those of the new weights. Collective
        over the engine's ranks, as `resume` is.
        """
        self._ask("pause", mode="retract")
        self._paused = True

    def resume(self) -> None:
        """Ends a pause; responses go on, and say in `Response.weight_versions` which version drew which tokens."""
        self._ask("go_on")
        self._paused = False

    def _check(self, requests: Sequence[Request]) -> None:
        seen: set[int] = set()
        for request in requests:
            who = f"request {request.request_id}"
            if request.request_id in seen:
                raise ValueError(f"{who} comes twice; give each request of a call its own id")
            seen.add(request.request_id)
            if not request.prompt_ids:
                raise ValueError(f"{who} has an empty prompt")
            if is_cut_off(request.sampling):
                kept_tokens(request.sampling, self._settings.options)
            total = len(request.prompt_ids) + request.sampling.max_new_tokens
            if total > self._settings.max_tokens:
                raise ValueError(
                    f"{who} needs {len(request.prompt_ids)} prompt tokens + {request.sampling.max_new_tokens} new "
                    f"tokens = {total}, and the engine was started for {self._settings.max_tokens}; shorten either"
                )

    def _refuse_if_generating(self) -> None:
        if self._generating:
            raise RuntimeError("another generate() of this engine is unfinished: exhaust or close its iterator first")

    def _run(self, requests: list[Request]) -> Iterator[Response]:
        self._refuse_if_generating()
        channel = self._channel
        assert channel is not None
        self._generating = True
        draws = [(request, index) for request in requests for index in range(request.sampling.n)]
        unfinished = len(draws)
        try:
            channel.draw([self._draw(key, request, index) for key, (request, index) in enumerate(draws)])
            while unfinished:
                drawn = channel.next_drawn()
                unfinished -= 1
                request, index = draws[drawn.key]
                yield self._response(request, index, drawn)
        except EngineDied:
            unfinished, self._is_dead = 0, True
            self._weight_version = None
            raise
        finally:
            if unfinished:  # the iterator was closed early
                channel.abort()
                for _ in range(unfinished):
                    channel.next_drawn()
            self._generating = False

    def _draw(self, key: int, request: Request, index: int) -> Draw:
        sampling = request.sampling
        is_cut = is_cut_off(sampling)
        seed = numpy.random.SeedSequence([sampling.seed, index]).generate_state(1)[0]
        return Draw(
            key=key,
            prompt_ids=list(request.prompt_ids),
            sampling={
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": kept_tokens(sampling, self._settings.options) if is_cut else sampling.top_k,
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": not sampling.stop_token_ids,
                "sampling_seed": int(seed) >> 1,
            },
            is_cut=is_cut,
            routed_experts=self._settings.return_routed_experts,
        )

    def _response(self, request: Request, index: int, drawn: Drawn | Refused) -> Response:
        if isinstance(drawn, Refused):
            raise RuntimeError(f"SGLang refused request {request.request_id}: {drawn.reason}")
        bad = [place for place, logprob in enumerate(drawn.logprobs) if not math.isfinite(logprob)]
        if bad:
            raise FloatingPointError(
                f"the log-prob of token {bad[0]} of a response to request {request.request_id} is not finite, with "
                f"weights of version {self._weight_version}: look at the training loss and the gradient norm of the "
                "steps before"
            )
        spans = tuple((start, int(version)) for start, version in drawn.weight_versions)
        version = self._weight_version
        assert version is not None
        return Response(
            request_id=request.request_id,
            index=index,
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            finish_reason=FinishReason(drawn.finish_reason),
            weight_version=spans[-1][1] if spans else version,
            weight_versions=spans if len(spans) > 1 else (),
            routed_experts=self._experts(request, drawn),
        )

    def _experts(self, request: Request, drawn: Drawn) -> numpy.ndarray | None:
        """`Response.routed_experts`, where they were asked for."""
        if drawn.routed_experts is None:
            return None
        tokens = len(request.prompt_ids) + len(drawn.token_ids)
        # SGLang leaves out the last token, and has rows of layers that have no experts.
        data = base64.b64decode(drawn.routed_experts)
        rows = numpy.frombuffer(data, dtype=numpy.int32).reshape(tokens - 1, self._layers, -1)
        experts = numpy.full((tokens, len(self._mixtures), rows.shape[2]), -1, dtype=numpy.int16)
        experts[:-1] = rows[:, self._mixtures]
        return experts

    # Weights

    def begin_weight_update(self, version: int) -> None:
        """See `Engine.begin_weight_update`. Collective over the engine's ranks."""
        if "weights" in self._asleep:
            raise RuntimeError("the engine's weights are asleep: wake them before an update")
        if self._next_version is not None:
            self._ask("end_weight_update")
        self._weight_version = None
        self._next_version = version
        self._received = set()
        self._ask("begin_weight_update")

    def receive_bucket(self, bucket: Bucket) -> None:
        """See `Engine.receive_bucket`. Collective over the engine's ranks.

        Raises:
            WeightUpdateError: on every rank of the engine, if any rank's tensors are not taken.
        """
        problem = self._refusal(bucket)
        handle = "" if problem else self._handle(bucket)
        sent = self._gather((problem, handle))
        problems = [
            f"{text} (rank {rank})" for rank, (text, _) in zip(self._placement.ranks, sent, strict=True) if text
        ]
        if problems:
            raise WeightUpdateError(problems[0])
        self._received.update(entry.name for entry in bucket.entries)
        handles, version = [handle for _, handle in sent], str(self._next_version)
        self._on_leader(lambda channel: self._deliver(channel, bucket, handles, version))

    @abstractmethod
    def _handle(self, bucket: Bucket) -> str:
        """What the first rank needs of this rank's bucket."""

    @abstractmethod
    def _deliver(self, channel: Channel, bucket: Bucket, handles: list[str], version: str) -> str | None:
        """Brings the buckets of all ranks to the engine, on the first; what went wrong, if anything did.

        Args:
            bucket: this rank's.
            handles: by rank.
        """

    def end_weight_update(self) -> None:
        """See `Engine.end_weight_update`. Collective over the engine's ranks."""
        if self._next_version is None:
            raise WeightUpdateError("end_weight_update() came without begin_weight_update()")
        received = set().union(*self._gather(self._received))
        missing = [name for name in self._shapes if name not in received]
        if missing:
            shown = ", ".join(missing[:_NAMES_SHOWN]) + (", …" if len(missing) > _NAMES_SHOWN else "")
            raise WeightUpdateError(f"{len(missing)} of {len(self._shapes)} tensors did not come: {shown}")
        self._ask("end_weight_update")
        if "kv_cache" not in self._asleep:
            self._ask("flush", paused=self._paused)
        self._weight_version, self._next_version = self._next_version, None

    def _refusal(self, bucket: Bucket) -> str | None:
        """Why this bucket cannot be taken, if so."""
        if self._next_version is None:
            return "a bucket came without begin_weight_update()"
        for entry in bucket.entries:
            if entry.name not in self._shapes:
                return f"the engine's model has no tensor {entry.name}"
            if entry.name in self._received:
                return f"{entry.name} came twice in one update"
            # The dtype is SGLang's to choose for each parameter: it converts.
            if tuple(entry.shape) != self._shapes[entry.name]:
                return (
                    f"{entry.name} came as {list(entry.shape)}, and the engine's model has "
                    f"{list(self._shapes[entry.name])}"
                )
        return None

    # Ranks of one engine

    def _ask(self, method: str, **arguments: Any) -> None:
        """Has the server do something (`server.Server.calls`), and gives every rank of the engine the outcome."""
        self._on_leader(lambda channel: channel.call(method, **arguments))

    def _on_leader(self, action: Callable[[Channel], str | None]) -> None:
        """Does something on the first rank, and gives every rank of the engine the outcome.

        Args:
            action: gives what went wrong, if anything did.

        Raises:
            WeightUpdateError: something did.
            EngineDied: it is gone.
        """

        def call() -> str | None:
            assert self._channel is not None
            try:
                return action(self._channel)
            except EngineDied as error:
                return _DIED + str(error)
            except (OSError, RuntimeError, ValueError) as error:  # raised here alone, the other ranks would wait
                return f"{type(error).__name__}: {error}"

        problem = self._from_leader(call)
        if problem is None:
            return
        self._weight_version = None
        if problem.startswith(_DIED):
            self._is_dead = True
            raise EngineDied(problem.removeprefix(_DIED))
        raise WeightUpdateError(problem)

    def _from_leader(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on the first rank of the engine, on all of them."""
        value = [make() if self._placement.is_leader else None]
        if self._group is not None:
            dist.broadcast_object_list(value, src=self._placement.first_rank, group=self._group)
        return value[0]

    def _gather(self, value: Any) -> list[Any]:
        """`value` of each rank of the engine, in order."""
        values = [value]
        if self._group is not None:
            values = [None] * self._placement.size
            dist.all_gather_object(values, value, group=self._group)
        return values
