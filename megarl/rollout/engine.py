"""What every engine offers the trainer: token ids in, token ids and log-probs out, and weights by Hugging Face name.

Text never passes through an engine: tokens that are decoded and encoded again need not be the tokens that were
sampled, and a loss on other tokens is silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

import numpy

from megarl.weights.bucket import Bucket

MemoryPart = Literal["weights", "kv_cache"]
"""What `Engine.wake` can bring back on its own."""
MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")

NO_TOP_K = -1
"""Value of `SamplingParams.top_k` that keeps the whole vocabulary; verl's and vLLM's."""


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """One of `stop_token_ids` was generated; it is the last token of the response."""
    LENGTH = "length"
    """`max_new_tokens` were generated."""
    ABORT = "abort"
    """`Engine.abort` was called; the response is what had been generated, possibly nothing."""


class WeightUpdateError(RuntimeError):
    """Weights that an engine cannot take, or an update that is incomplete. The engine does not generate until a whole
    update has gone through."""


class EngineDied(RuntimeError):
    """An engine's processes ended. It has no weights, and answers nothing, until it is started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the responses to one prompt are drawn.

    The sampling distribution is softmax(logits / temperature), cut to the `top_k` most likely tokens and renormalised,
    then cut to the fewest most likely tokens whose probabilities sum to at least `top_p` and renormalised: the order
    of transformers and vLLM. Of tokens with equal logits at the edge of a cut, which ones stay is not specified.
    """

    n: int
    """Responses."""
    max_new_tokens: int
    """Tokens of a response at most."""
    seed: int
    """With a response's index and a token's position this is all that its random numbers depend on: whatever else is
    in the batch, the same seed gives the same response, as far as the floating-point sums of another batch agree."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response; empty: nothing but the limit does."""
    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy."""
    top_p: float = 1.0
    """1 keeps all tokens."""
    top_k: int = NO_TOP_K

    def __post_init__(self) -> None:
        """Raises ValueError for values that no distribution has."""
        checks = {
            f"n must be at least 1, not {self.n}": self.n >= 1,
            f"max_new_tokens must be at least 1, not {self.max_new_tokens}": self.max_new_tokens >= 1,
            f"temperature must be at least 0, not {self.temperature}": self.temperature >= 0,
            f"top_p must be above 0 and at most 1, not {self.top_p}": 0 < self.top_p <= 1,
            f"top_k must be at least 1, or {NO_TOP_K} for all tokens, not {self.top_k}": (
                self.top_k >= 1 or self.top_k == NO_TOP_K
            ),
        }
        for problem, fine in checks.items():
            if not fine:
                raise ValueError(problem)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt and how to answer it."""

    request_id: int
    """Comes back with each response. Unique within a `generate` call."""
    prompt_ids: Sequence[int]
    """The whole prompt, with its chat template and BOS."""
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One finished response."""

    request_id: int
    index: int
    """Which of the request's `n` responses, from 0."""
    token_ids: list[int]
    """With the stop token, if there is one; without the prompt."""
    logprobs: list[float]
    """Of each token, natural logarithm, float32, under the distribution it was drawn from (see `SamplingParams`:
    after temperature and cuts). A greedy response draws from nothing: its log-probs are those of softmax(logits), at
    temperature 1 and uncut, since the point mass's own log-prob, 0, would say nothing."""
    finish_reason: FinishReason
    weight_version: int
    """Of the weights that generated it; where several did, of those that drew its last token."""
    weight_versions: tuple[tuple[int, int], ...] = ()
    """Where weights changed in its middle: (first token, version) of each span. Empty: one version drew all of it."""
    routed_experts: numpy.ndarray | None = None
    """int16 [prompt + response, mixtures, top-k]: the experts that each token went to in each layer that has some, in
    any order; -1 for a token that was not computed, as the last one that was sampled. None where the engine was not
    asked for them."""


class Engine(Protocol):
    """What generates.

    One thread uses an engine at a time, except for `abort`, which any thread may call.
    """

    @property
    def weight_version(self) -> int | None:
        """The version given to the last complete update; None where there is none, and then nothing is generated."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Response]:
        """Generates all responses, yielding each as it finishes, in no set order: scoring runs beside generation.

        The requests are checked before this returns; generation runs while the iterator is advanced, or beside it.
        Closing the iterator early drops what is unfinished.

        Raises:
            ValueError: a request that cannot be answered (empty prompt, longer than the model's positions, …).
            RuntimeError: no complete weights, asleep, or another `generate` is unfinished.
        """

    def abort(self) -> None:
        """Ends the running `generate` soon: unfinished responses come out with `FinishReason.ABORT`."""

    def begin_weight_update(self, version: int) -> None:
        """Opens an update. Until it is complete, nothing is generated. A second call drops what the first received.

        Args:
            version: of the new weights: the number of optimizer steps they have seen.
        """

    def receive_bucket(self, bucket: Bucket) -> None:
        """Takes a bucket of whole tensors under their Hugging Face checkpoint names (experts one by one).

        When it returns, the engine has copied what it needs and the sender may overwrite the bucket. Where an engine
        has several ranks, each calls it with a bucket of its own: dense tensors are in all of them, and those of an
        expert only where the engine's rank has that expert. All ranks call it equally often, so a bucket may be empty,
        and where it raises on one of an engine's ranks it has to raise on all: they stop taking buckets together.

        Raises:
            WeightUpdateError: unknown or repeated name, wrong shape or dtype, no open update, or a tensor whose
                checksum, where the bucket has checksums, is not that of what the engine then holds.
        """

    def end_weight_update(self) -> None:
        """Closes the update; the new weights are in use from here on.

        Raises:
            WeightUpdateError: tensors are missing, or no open update.
        """

    def sleep(self) -> None:
        """Gives memory back to the trainer. Nothing is generated until `wake`."""

    def wake(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Takes memory again; weights first and the KV cache after the sync, where memory is short."""
