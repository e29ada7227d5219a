"""Keys and values of all running responses in two tensors, a slot for each, written in place.

Keys lie transposed in memory, [slots, heads, width, tokens]: a step's product of queries and keys then reads them row
by row, which oneDNN does in half the time in bfloat16. What a cache hands to the model is a view in the usual order.
"Keys" and "values" are what the family caches: with multi-head latent attention, compressed latents of one head.

Slots `0 … running - 1` are always the ones in use, so that a decoding step reads them as one slice: a finished
response's slot is given to a waiting one, or else to the last one, whose keys and values are copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from transformers.cache_utils import Cache


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a prefill leaves of one prompt, for its samples to start from."""

    keys: Tensor
    """[layers, heads, width, tokens]"""
    values: Tensor
    """[layers, heads, tokens, width]"""
    next_logits: Tensor
    """[vocabulary] float32: of the token after the prompt."""
    routed_experts: numpy.ndarray | None = None
    """int16 [tokens, mixtures, top-k], where they are recorded."""

    @property
    def length(self) -> int:
        return self.values.shape[2]


class PrefillCache(Cache):
    """Collects the keys and values of a prefill, [prompts, heads, tokens, width] of each layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.keys.append(key_states)
        self.values.append(value_states)
        return key_states, value_states

    def prefix(
        self, prompt: int, length: int, next_logits: Tensor, routed_experts: numpy.ndarray | None = None
    ) -> Prefix:
        """Copies one prompt's share out."""
        return Prefix(
            torch.stack([layer[prompt, :, :length].transpose(1, 2) for layer in self.keys]),
            torch.stack([layer[prompt, :, :length] for layer in self.values]),
            next_logits,
            routed_experts,
        )


class SlotCache(Cache):
    """The keys and values of the running responses, with room for `slots` × `tokens`."""

    def __init__(self, like: Prefix, slots: int, tokens: int) -> None:
        """Allocates everything at once, for heads, widths, dtype and device of `like`."""
        super().__init__(layers=[])
        self.slots = slots
        self.tokens = tokens
        # Zeros and not empty: a step reads slots up to its longest response, and what is masked out of attention is
        # still multiplied by its weight of 0, which would make NaN of an infinity left in that memory.
        layers, heads, key_width, _ = like.keys.shape
        value_width = like.values.shape[3]
        self._keys = like.keys.new_zeros(layers, slots, heads, key_width, tokens)
        self._values = like.values.new_zeros(layers, slots, heads, tokens, value_width)
        self._layers = list(zip(self._keys.unbind(0), self._values.unbind(0), strict=True))
        self._views: list[tuple[Tensor, Tensor]] = []
        self._rows = self._positions = torch.empty(0, dtype=torch.int64)

    @torch.inference_mode()
    def start(self, slot: int, prefix: Prefix) -> None:
        """Copies a prompt into a slot."""
        self._keys[:, slot, :, :, : prefix.length] = prefix.keys
        self._values[:, slot, :, : prefix.length] = prefix.values

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one slot into another."""
        self._keys[:, target, ..., :length] = self._keys[:, source, ..., :length]
        self._values[:, target, :, :length] = self._values[:, source, :, :length]

    def begin_step(self, positions: Tensor, length: int) -> None:
        """Prepares for one token in each of the first slots.

        Args:
            positions: [running] where each slot's token goes.
            length: the highest position plus one: how far attention reads.
        """
        running = positions.shape[0]
        self._positions = positions
        self._rows = torch.arange(running, device=positions.device)
        self._views = [(keys[:running, ..., :length], values[:running, :, :length]) for keys, values in self._layers]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one token of each running slot, [running, heads, 1, width].

        Returns:
            All that attention reads: keys and values, [running, heads, length, width].
        """
        keys, values = self._views[layer_idx]
        keys[self._rows, :, :, self._positions] = key_states.squeeze(2)
        values[self._rows, :, self._positions] = value_states.squeeze(2)
        return keys.transpose(2, 3), values
