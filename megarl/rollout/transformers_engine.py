"""An engine over a transformers model in this process: runs anywhere, and is the default on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megarl import platform
from megarl.models.bridge import read_hf_config
from megarl.rollout.decoder import Decoder
from megarl.rollout.engine import MEMORY_PARTS, Engine, MemoryPart, Request, Response, WeightUpdateError
from megarl.rollout.generation import Generation
from megarl.rollout.kv_cache import Prefix, SlotCache
from megarl.rollout.parameters import checkpoint_tensors
from megarl.weights.bucket import Bucket, pack
from megarl.weights.checksum import checksum
from megarl.weights.safetensors_io import SafetensorsReader

_NAMES_SHOWN = 3
"""Of missing tensors, in an error."""


class TransformersEngine(Engine):
    """Generates with a transformers model that this rank holds whole; an `Engine`.

    Memory: the weights, on a CPU a second, packed copy of the linear layers, and a KV cache of `max_num_seqs` ×
    (longest prompt + its `max_new_tokens`) tokens, which the first `generate` allocates and a longer one replaces.
    `sleep` frees the cache and the packed copy; the weights stay.
    """

    def __init__(
        self, folder: str | Path, *, dtype: torch.dtype, max_num_seqs: int, return_routed_experts: bool = False
    ) -> None:
        """Builds the model of a Hugging Face folder, without its weights: these come by an update, or `load_folder`.

        Args:
            dtype: of weights and arithmetic; log-probs are float32 whatever it is.
            max_num_seqs: responses that are decoded at once.
            return_routed_experts: responses have the experts that their tokens went to (`Response.routed_experts`).

        Raises:
            ConfigError: the folder or its model is not supported.
        """
        self._decoder = Decoder(
            read_hf_config(folder),
            dtype=dtype,
            device=torch.device(platform.current().device),
            rows=max_num_seqs,
            record_experts=return_routed_experts,
        )
        self._tensors = checkpoint_tensors(self._decoder.model)
        self._max_num_seqs = max_num_seqs
        self._weight_version: int | None = None
        self._next_version: int | None = None
        self._received: set[str] = set()
        self._asleep: set[MemoryPart] = set()
        self._cache: SlotCache | None = None
        self._generating = False
        self._aborted = threading.Event()

    @property
    def weight_version(self) -> int | None:
        return self._weight_version

    # Generation

    def generate(self, requests: Sequence[Request]) -> Iterator[Response]:
        """See `Engine.generate`. Generation runs while the iterator is advanced."""
        if self._weight_version is None:
            raise RuntimeError("the engine has no complete weights: update them before generating")
        if self._asleep:
            raise RuntimeError(f"the engine sleeps ({', '.join(sorted(self._asleep))}): wake it before generating")
        self._refuse_if_generating()
        self._check(requests)
        return self._run(list(requests), self._weight_version)

    def abort(self) -> None:
        """See `Engine.abort`. Takes effect after the decoding step that is running."""
        self._aborted.set()

    def _check(self, requests: Sequence[Request]) -> None:
        seen: set[int] = set()
        for request in requests:
            who = f"request {request.request_id}"
            prompt, new = request.prompt_ids, request.sampling.max_new_tokens
            if request.request_id in seen:
                raise ValueError(f"{who} comes twice; give each request of a call its own id")
            seen.add(request.request_id)
            if not prompt:
                raise ValueError(f"{who} has an empty prompt")
            if min(prompt) < 0 or max(prompt) >= self._decoder.vocab_size:
                raise ValueError(
                    f"{who} has token {min(prompt) if min(prompt) < 0 else max(prompt)}, and the model's vocabulary is "
                    f"0 … {self._decoder.vocab_size - 1}; use the model's own tokenizer"
                )
            if len(prompt) + new > self._decoder.max_positions:
                raise ValueError(
                    f"{who} needs {len(prompt)} prompt tokens + {new} new tokens = {len(prompt) + new} positions, and "
                    f"the model has {self._decoder.max_positions} (max_position_embeddings); shorten either"
                )

    def _run(self, requests: Sequence[Request], version: int) -> Iterator[Response]:
        # Set here and not in generate(): an iterator that is dropped before its first item never runs its `finally`.
        self._refuse_if_generating()
        self._generating = True
        self._aborted.clear()
        generation = Generation(
            self._decoder,
            requests,
            weight_version=version,
            max_num_seqs=self._max_num_seqs,
            cache_for=self._cache_for,
            aborted=self._aborted,
        )
        try:
            yield from generation.run()
        except FloatingPointError:
            self._cache = None  # it may hold NaN, which later responses in the same slots would read
            raise
        finally:
            self._generating = False

    def _refuse_if_generating(self) -> None:
        if self._generating:
            raise RuntimeError("another generate() of this engine is unfinished: exhaust or close its iterator first")

    def _cache_for(self, like: Prefix, slots: int, tokens: int) -> SlotCache:
        """The cache of the call before, if it is large enough."""
        if self._cache is None or self._cache.slots < slots or self._cache.tokens < tokens:
            self._cache = None  # freed before the new one is allocated
            self._cache = SlotCache(like, slots, tokens)
        return self._cache

    # Weights

    def begin_weight_update(self, version: int) -> None:
        """See `Engine.begin_weight_update`."""
        self._refuse_if_generating()
        if "weights" in self._asleep:
            raise RuntimeError("the engine's weights are asleep: wake them before an update")
        self._weight_version = None
        self._next_version = version
        self._received = set()
        self._decoder.free_copies()

    def receive_bucket(self, bucket: Bucket) -> None:
        """See `Engine.receive_bucket`. Checksums are of the model's own memory, after the copy."""
        if self._next_version is None:
            raise WeightUpdateError("weights came without begin_weight_update()")
        for name, tensor in bucket.tensors():
            held = self._tensor(name)
            if name in self._received:
                raise WeightUpdateError(f"{name} came twice in one update")
            if tensor.shape != held.shape or tensor.dtype != held.dtype:
                raise WeightUpdateError(
                    f"{name} came as {tensor.dtype} {list(tensor.shape)}, and the engine holds {held.dtype} "
                    f"{list(held.shape)}"
                )
            held.copy_(tensor)
            if bucket.checksums is not None and checksum(held) != bucket.checksums[name]:
                raise WeightUpdateError(f"{name} arrived changed: its checksum is not the one of the trainer's weights")
            self._received.add(name)

    def end_weight_update(self) -> None:
        """See `Engine.end_weight_update`."""
        if self._next_version is None:
            raise WeightUpdateError("end_weight_update() came without begin_weight_update()")
        missing = [name for name in self._tensors if name not in self._received]
        if missing:
            shown = ", ".join(missing[:_NAMES_SHOWN]) + (", …" if len(missing) > _NAMES_SHOWN else "")
            raise WeightUpdateError(f"{len(missing)} of {len(self._tensors)} tensors did not come: {shown}")
        self._decoder.weights_changed()
        self._weight_version, self._next_version = self._next_version, None

    def load_folder(self, folder: str | Path, *, version: int = 0) -> None:
        """Updates the weights from a Hugging Face folder, in this engine's dtypes.

        Raises:
            ConfigError: the folder has no readable safetensors.
            WeightUpdateError: it is of another model.
        """
        reader = SafetensorsReader(folder)
        self.begin_weight_update(version)
        for name in reader.names():
            self.receive_bucket(pack([(name, reader.read(name).to(self._tensor(name).dtype))]))
        self.end_weight_update()

    def _tensor(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise WeightUpdateError(f"the engine's model has no tensor {name}") from None

    # Memory

    def sleep(self) -> None:
        """See `Engine.sleep`. Frees the KV cache and the packed copy of the weights."""
        self._refuse_if_generating()
        self._asleep = set(MEMORY_PARTS)
        self._cache = None
        self._decoder.free_copies()

    def wake(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """See `Engine.wake`."""
        if "weights" in self._asleep.intersection(parts) and self._weight_version is not None:
            self._decoder.weights_changed()
        self._asleep.difference_update(parts)
