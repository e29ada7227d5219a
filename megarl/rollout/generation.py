"""One `generate` call: prefill, decoding steps, and responses as they finish."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch
from torch import Tensor

from megarl.rollout.batch import Running, Slots, Waiting
from megarl.rollout.decoder import Decoder
from megarl.rollout.engine import FinishReason, Request, Response
from megarl.rollout.kv_cache import Prefix, SlotCache
from megarl.rollout.sampling import draw, uniforms


class Generation:
    """The state of one call."""

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        *,
        weight_version: int,
        max_num_seqs: int,
        cache_for: Callable[[Prefix, int, int], SlotCache],
        aborted: threading.Event,
    ) -> None:
        """Nothing runs yet.

        Args:
            cache_for: gives a cache like a prefix, with so many slots of so many tokens at least.
            aborted: is looked at before each step.
        """
        self._decoder = decoder
        self._version = weight_version
        self._aborted = aborted
        self._waiting = Waiting(requests)
        tokens = max((len(request.prompt_ids) + request.sampling.max_new_tokens for request in requests), default=0)
        self._slots = Slots(
            min(max_num_seqs, len(self._waiting)), lambda prefix, slots: cache_for(prefix, slots, tokens)
        )

    def run(self) -> Iterator[Response]:
        """Generates.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        while not self._aborted.is_set():
            yield from self._fill_slots()
            running = self._slots.close_up()
            if not running:
                break
            logits = self._decoder.decode(
                self._slots.cache,
                [response.token_ids[-1] for response in running],
                [response.position for response in running],
            )
            if self._decoder.recorder is not None:
                for response, experts in zip(running, self._decoder.recorder.take(), strict=True):
                    response.routed_experts.append(experts[None])
            yield from self._advance(running, logits)
        for response in [*self._slots.drain(), *self._waiting.drain()]:
            if self._decoder.recorder is not None and not response.routed_experts:
                response.routed_experts.append(self._decoder.recorder.unknown(response.position))
            yield response.finished(FinishReason.ABORT, self._version)

    def _fill_slots(self) -> Iterator[Response]:
        """Starts waiting responses while there are slots; yields those that their first token finishes."""
        while self._waiting and self._slots.free and not self._aborted.is_set():
            prompts = self._waiting.prompts_to_prefill(self._slots.free)
            if prompts:
                prefixes = self._decoder.prefill([request.prompt_ids for request in prompts])
                self._waiting.add_prefixes(prompts, prefixes)
            started: list[Running] = []
            logits: list[Tensor] = []
            while self._slots.free and (ready := self._waiting.pop()):
                response, prefix = ready
                self._slots.start(response, prefix)
                if prefix.routed_experts is not None:
                    response.routed_experts.append(prefix.routed_experts)
                started.append(response)
                logits.append(prefix.next_logits)
            yield from self._advance(started, torch.stack(logits))

    def _advance(self, running: Sequence[Running], logits: Tensor) -> Iterator[Response]:
        """Draws the next token of each response; yields those that it finishes."""
        keys = numpy.array([response.key for response in running], dtype=numpy.uint64)
        uniform = uniforms(keys, [len(response.token_ids) for response in running])
        tokens, logprobs = draw(logits, [response.request.sampling for response in running], uniform)
        finished = []
        for response, token, logprob in zip(running, tokens.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                cause = "look at the training loss and the gradient norm of the steps before"
                if self._version == 0:
                    cause = "these are the weights that the run started from: look for NaN in the files of model.path"
                raise FloatingPointError(
                    f"the model's logits are not finite at token {len(response.token_ids)} of a response to request "
                    f"{response.request.request_id}, with weights of version {self._version}; {cause}"
                )
            reason = response.append(token, logprob)
            if reason is not None:
                self._slots.finish(response)
                finished.append(response.finished(reason, self._version))
        yield from finished
