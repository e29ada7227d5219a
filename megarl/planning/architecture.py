"""The weights of a model, layer by layer, with how Megatron-Core shares each of them out.

The lists follow the parameters that `models.build` makes through mbridge 0.15.1 and Megatron-Core 0.16.1;
`tests/planning/test_parameters.py` compares them with the real ones of every family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from megarl.config.model_shape import ModelShape

_QKV_BIAS_FAMILIES = ("qwen2", "qwen2_moe", "glm4_moe")
_QK_NORM_FAMILIES = ("qwen3", "qwen3_moe")


class Split(StrEnum):
    """How a weight is shared out within one pipeline stage."""

    TENSOR = "tensor"
    """Over tensor-parallel ranks."""
    WHOLE = "whole"
    """Every rank has it."""
    EXPERT = "expert"
    """A weight of the routed experts: over expert- and expert-tensor-parallel ranks."""


class Head(StrEnum):
    """What stands after the last layer."""

    LOGITS = "logits"
    """A language model's output layer."""
    SCORE = "score"
    """One number for each token: a reward model."""
    VALUE = "value"
    """The same with a bias: a critic."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, or several of a kind, of the whole model."""

    name: str
    numel: int
    split: Split
    is_matrix: bool = True
    """Whether tokens are multiplied by it, which is what costs FLOPs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Architecture:
    """A model's shape, and the details that its weights and activations depend on.

    Compared by identity, since it is the key of caches that a search asks hundreds of thousands of times.
    """

    shape: ModelShape
    qkv_bias: bool = False
    qk_norm: bool = False
    rotary_dim: int = 0
    """Width of a head that is rotated."""

    @classmethod
    def from_hf(cls, path: str | Path) -> Self:
        """Reads a model folder's config.json.

        Raises:
            ConfigError: as `ModelShape.from_hf`.
        """
        shape = ModelShape.from_hf(path)
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        values: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        family = shape.model_type
        rope_parameters = values.get("rope_parameters") or values
        partial = rope_parameters.get("partial_rotary_factor", 0.5 if family == "glm4_moe" else 1.0)
        return cls(
            shape=shape,
            qkv_bias=family in _QKV_BIAS_FAMILIES or (family == "llama" and bool(values.get("attention_bias"))),
            qk_norm=family in _QK_NORM_FAMILIES or (family == "glm4_moe" and bool(values.get("use_qk_norm"))),
            rotary_dim=shape.latent.rope if shape.latent else int(shape.head_dim * partial),
        )

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, is a mixture of experts."""
        return self.shape.is_moe and layer >= self.shape.num_dense_layers

    def layer_kinds(self) -> list[bool]:
        """Of each layer, whether it is a mixture of experts."""
        return [self.is_moe_layer(layer) for layer in range(self.shape.num_layers)]

    def layer_weights(self, is_moe: bool) -> Iterator[Weight]:
        """The weights of one transformer layer of a kind."""
        hidden = self.shape.hidden_size
        yield Weight("input norm", hidden, Split.WHOLE, is_matrix=False)
        yield from self._latent_attention_weights() if self.shape.latent else self._attention_weights()
        yield Weight("norm before feed-forward", hidden, Split.WHOLE, is_matrix=False)
        if is_moe:
            yield from self._expert_weights()
        else:
            yield Weight("feed-forward", 3 * hidden * self.shape.ffn_size, Split.TENSOR)

    def embedding(self, padded_vocab: int) -> Weight:
        """The embedding; a lookup, so it costs no FLOPs."""
        return Weight("embedding", padded_vocab * self.shape.hidden_size, Split.TENSOR, is_matrix=False)

    def head_weights(self, head: Head, padded_vocab: int) -> Iterator[Weight]:
        """The final norm and the head, without regard to tied embeddings."""
        hidden = self.shape.hidden_size
        yield Weight("final norm", hidden, Split.WHOLE, is_matrix=False)
        if head is Head.LOGITS:
            yield Weight("output layer", padded_vocab * hidden, Split.TENSOR)
            return
        yield Weight("scalar head", hidden, Split.WHOLE)
        if head is Head.VALUE:
            yield Weight("scalar head's bias", 1, Split.WHOLE, is_matrix=False)

    def key_value_cache_elements(self) -> int:
        """Elements that an engine caches for one token: keys and values of all layers, or latents and rotated keys."""
        latent = self.shape.latent
        width = latent.key_value_rank + latent.rope if latent else 2 * self.shape.key_value_width
        return self.shape.num_layers * width

    def _attention_weights(self) -> Iterator[Weight]:
        hidden, rows = self.shape.hidden_size, self.shape.query_width + 2 * self.shape.key_value_width
        yield Weight("query-key-value", rows * hidden, Split.TENSOR)
        if self.qkv_bias:
            yield Weight("query-key-value bias", rows, Split.TENSOR, is_matrix=False)
        if self.qk_norm:
            yield Weight("query and key norms", 2 * self.shape.head_dim, Split.WHOLE, is_matrix=False)
        yield Weight("attention output", hidden * self.shape.query_width, Split.TENSOR)

    def _latent_attention_weights(self) -> Iterator[Weight]:
        latent, hidden, heads = self.shape.latent, self.shape.hidden_size, self.shape.num_heads
        assert latent is not None
        if latent.query_rank is None:
            yield Weight("query", hidden * self.shape.query_width, Split.TENSOR)
        else:
            yield Weight("query down", hidden * latent.query_rank, Split.WHOLE)
            yield Weight("query latent norm", latent.query_rank, Split.WHOLE, is_matrix=False)
            yield Weight("query up", latent.query_rank * self.shape.query_width, Split.TENSOR)
        yield Weight("key-value down", hidden * (latent.key_value_rank + latent.rope), Split.WHOLE)
        yield Weight("key-value latent norm", latent.key_value_rank, Split.WHOLE, is_matrix=False)
        yield Weight("key-value up", latent.key_value_rank * heads * (latent.nope + latent.value), Split.TENSOR)
        yield Weight("attention output", hidden * self.shape.attention_output_width, Split.TENSOR)

    def _expert_weights(self) -> Iterator[Weight]:
        shape = self.shape
        yield Weight("router", shape.num_experts * shape.hidden_size, Split.WHOLE)
        yield Weight("experts", shape.num_experts * self.expert_numel, Split.EXPERT)
        if shape.shared_ffn_size:
            yield Weight("shared experts", 3 * shape.hidden_size * shape.shared_ffn_size, Split.TENSOR)
        if self.has_shared_gate:
            yield Weight("shared expert's gate", shape.hidden_size, Split.WHOLE)

    @property
    def has_shared_gate(self) -> bool:
        """Whether the shared expert's output is weighted by a gate of its own."""
        return self.shape.model_type == "qwen2_moe" and self.shape.shared_ffn_size > 0

    @property
    def expert_numel(self) -> int:
        """Weights of one routed expert."""
        return 3 * self.shape.hidden_size * self.shape.moe_ffn_size
