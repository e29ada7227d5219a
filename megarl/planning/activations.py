"""What forward passes keep for backward passes, in bytes on one rank.

Each term is a tensor that an operation saves. `CPU` has the operations of the torch backend on a CPU, on which
`tests/planning/test_activations.py` sums the bytes that autograd really saves; `GPU` has fused ones, after the saved
tensors of Transformer Engine 2.9 and Megatron-Core 0.16.1, which are not measured there. A token is counted on the rank
that has it: context parallelism shares tokens out, and sequence parallelism does outside attention and feed-forward.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megarl.config.layout import Layout
from megarl.planning.architecture import Architecture, Head
from megarl.planning.parameters import Chunk, padded_vocab
from megarl.planning.schedule import PassBytes

_FLOAT32 = 4
_INT64 = 8
_LOGPROB_BYTES = 50
"""Of each token whose log-prob is taken: targets, masks, normalisers (`models.logprobs`, `models.outputs`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """How the operations of a device are cut, which decides what they save."""

    fused: bool
    """Norms keep their input and SwiGLU its two halves. Unfused, RMSNorm keeps its input and its output in float32, and
    SwiGLU two intermediate results as well."""
    attention_matrix: bool
    """Attention with key and value heads of unequal width keeps its matrix, in float32, with copies of what it is made
    from. Others are done by a flash kernel (arXiv:2205.14135), which keeps its inputs, its output and a number a row.
    """


CPU = Kernels(fused=False, attention_matrix=True)
GPU = Kernels(fused=True, attention_matrix=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """The `model.recompute_*` keys."""

    granularity: str = "none"
    method: str = "uniform"
    num_layers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSettings:
    """What the bytes of a pass depend on besides model and layout."""

    tokens: int
    """Of one micro-batch on one context-parallel rank."""
    sequence_tokens: int
    """Of its longest sequence; only attention matrices depend on it."""
    predicted: int
    """Tokens of the micro-batch whose log-probs are taken."""
    element_bytes: int
    """Of weights and activations: 2 for bfloat16."""
    kernels: Kernels = GPU
    recompute: Recompute = Recompute()
    expert_load: float = 1.0
    """Tokens of the busiest expert-parallel rank over the mean."""


def chunk_activations(
    architecture: Architecture, layout: Layout, chunk: Chunk, head: Head, settings: PassSettings
) -> PassBytes:
    """What one micro-batch keeps on one virtual pipeline stage."""
    layers = [_layer_bytes(architecture, layout, architecture.is_moe_layer(layer), settings) for layer in chunk.layers]
    kept, recomputed = _with_recomputation(layers, settings.recompute)
    token_ids = _INT64 * settings.tokens if chunk.is_first else 0.0
    return PassBytes(
        layers=kept + token_ids,
        head=head_bytes(architecture, layout, head, settings) if chunk.is_last else 0.0,
        recomputed=recomputed,
    )


def head_bytes(architecture: Architecture, layout: Layout, head: Head, settings: PassSettings) -> float:
    """The final norm, the head and its output; for a language model mostly the logits."""
    hidden = architecture.shape.hidden_size
    norm = _sharded_tokens(layout, settings) * _norm_bytes(hidden, settings)
    if head is not Head.LOGITS:
        return norm + settings.tokens * _FLOAT32 * hidden
    columns = padded_vocab(architecture, layout.tp) // layout.tp
    return norm + settings.predicted * (settings.element_bytes * (hidden + columns) + _LOGPROB_BYTES)


def logits_bytes(architecture: Architecture, layout: Layout, settings: PassSettings) -> float:
    """The logits of one micro-batch alone."""
    return settings.predicted * settings.element_bytes * (padded_vocab(architecture, layout.tp) // layout.tp)


def working_bytes(architecture: Architecture, layout: Layout, settings: PassSettings) -> float:
    """The most that one layer's forward pass holds where nothing is kept for a backward pass."""
    kinds = set(architecture.layer_kinds())
    return max(_layer_bytes(architecture, layout, is_moe, settings).all for is_moe in kinds)


def backward_bytes(architecture: Architecture, layout: Layout, settings: PassSettings) -> float:
    """Gradients of activations at the widest point of a layer: of the feed-forward's first product and of its input,
    which tensor-parallel ranks gather whole. By estimate."""
    shape = architecture.shape
    width = 2 * shape.ffn_size / layout.tp
    if shape.is_moe:
        arriving = shape.experts_per_token * layout.etp * settings.expert_load
        arriving *= _sharded_tokens(layout, settings) / settings.tokens
        width = max(width, arriving * (2 * shape.moe_ffn_size / layout.etp + shape.hidden_size))
    return settings.element_bytes * settings.tokens * (width + 2 * shape.hidden_size)


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    all: float
    """With everything kept."""
    core_attention: float
    """That part of it which selective recomputation does not keep."""
    input: float


def _with_recomputation(layers: list[_LayerBytes], recompute: Recompute) -> tuple[float, float]:
    """(kept, recomputed) of the layers of a chunk."""
    if recompute.granularity == "none" or not layers:
        return sum(layer.all for layer in layers), 0.0
    if recompute.granularity == "selective":
        again = max(layer.core_attention for layer in layers)
        return sum(layer.all - layer.core_attention for layer in layers), again
    size = recompute.num_layers
    if recompute.method == "block":
        few, others = layers[:size], layers[size:]
        kept = sum(layer.input for layer in few) + sum(layer.all for layer in others)
        return kept, max(layer.all for layer in few)
    groups = [layers[start : start + size] for start in range(0, len(layers), size)]
    return sum(group[0].input for group in groups), max(sum(layer.all for layer in group) for group in groups)


@functools.lru_cache(maxsize=4096)
def _layer_bytes(architecture: Architecture, layout: Layout, is_moe: bool, settings: PassSettings) -> _LayerBytes:
    attention, core = (
        _latent_attention_bytes(architecture, layout, settings)
        if architecture.shape.latent
        else _attention_bytes(architecture, layout, settings)
    )
    feed_forward = (
        _expert_bytes(architecture, layout, settings) if is_moe else _dense_bytes(architecture, layout, settings)
    )
    hidden = architecture.shape.hidden_size
    norm_and_output = _norm_bytes(hidden, settings) + settings.element_bytes * hidden
    sharded = _sharded_tokens(layout, settings)
    return _LayerBytes(
        all=2 * sharded * norm_and_output + attention + feed_forward,
        core_attention=core,
        input=sharded * settings.element_bytes * hidden,
    )


def _attention_bytes(architecture: Architecture, layout: Layout, settings: PassSettings) -> tuple[float, float]:
    """Grouped-query attention without its norm and input: (all, what selective recomputation does not keep)."""
    element, shape = settings.element_bytes, architecture.shape
    queries = architecture.shape.query_width / layout.tp
    if shape.num_kv_heads < layout.tp:
        # Megatron-Core gathers the whole projection and takes one key-value head; the values are a view of it.
        keys = float(shape.head_dim)
        fused_output = float(element * (architecture.shape.query_width + 2 * architecture.shape.key_value_width))
    else:
        keys = architecture.shape.key_value_width / layout.tp
        fused_output = element * (queries + 2 * keys)  # kept because the values are a part of it
    rotated = element * (queries + keys)
    output = element * queries
    core = _FLOAT32 * shape.num_heads / layout.tp + (0 if settings.kernels.fused else output)
    per_token = fused_output + rotated + output + core + _rope_bytes(architecture, settings)
    if architecture.qk_norm:
        per_token += _qk_norm_bytes(queries, keys, settings)
    return settings.tokens * per_token, settings.tokens * core


def _latent_attention_bytes(architecture: Architecture, layout: Layout, settings: PassSettings) -> tuple[float, float]:
    """Multi-latent attention without its norm and input."""
    latent, element = architecture.shape.latent, settings.element_bytes
    assert latent is not None
    heads = architecture.shape.num_heads / layout.tp
    latents = [latent.key_value_rank, *([latent.query_rank] if latent.query_rank else [])]
    sharded = sum(_norm_bytes(width, settings) + element * width for width in latents)
    width = latent.nope + latent.rope
    inputs = element * heads * (2 * width + latent.nope + latent.value)  # values are a part of their up-projection
    output = element * heads * latent.value
    if settings.kernels.attention_matrix:
        # The kernel keeps float32 copies of queries, keys and values instead, which selective recomputation drops.
        core = _FLOAT32 * heads * (2 * width + latent.value + settings.sequence_tokens)
        inputs = inputs if settings.recompute.granularity == "selective" else 0.0
    else:
        core = _FLOAT32 * heads
    per_token = inputs + output + core + _rope_bytes(architecture, settings)
    return _sharded_tokens(layout, settings) * sharded + settings.tokens * per_token, settings.tokens * core


def _dense_bytes(architecture: Architecture, layout: Layout, settings: PassSettings) -> float:
    """A dense feed-forward without its norm and input."""
    return settings.tokens * _swiglu_bytes(architecture.shape.ffn_size / layout.tp, settings)


def _expert_bytes(architecture: Architecture, layout: Layout, settings: PassSettings) -> float:
    """A mixture of experts without its norm; its input is that of router and shared expert."""
    shape, element = architecture.shape, settings.element_bytes
    routed = _sharded_tokens(layout, settings)
    # Two masks over the experts and, for each of the chosen ones, an index and two probabilities.
    router = routed * (shape.num_experts * (2 * _FLOAT32 + 1) + shape.experts_per_token * 4 * _INT64)
    arriving = routed * shape.experts_per_token * layout.etp * settings.expert_load
    width = shape.moe_ffn_size / layout.etp
    weighting = 0 if settings.kernels.fused else element * width
    experts = arriving * (element * shape.hidden_size + _swiglu_bytes(width, settings) + weighting + _FLOAT32)
    shared = settings.tokens * _swiglu_bytes(shape.shared_ffn_size / layout.tp, settings)
    if architecture.has_shared_gate:
        shared += routed * element * shape.hidden_size
    return router + experts + shared


def _swiglu_bytes(width: float, settings: PassSettings) -> float:
    """Of one token: gate and up projection, and the product that goes on; unfused also the two factors."""
    return settings.element_bytes * width * (3 if settings.kernels.fused else 5)


def _norm_bytes(width: int, settings: PassSettings) -> float:
    """Of one token, without the output."""
    if settings.kernels.fused:
        return settings.element_bytes * width + _FLOAT32
    return 2 * _FLOAT32 * width + _FLOAT32


def _qk_norm_bytes(queries: float, keys: float, settings: PassSettings) -> float:
    """Norms over each head. The keys' input is a part of the fused projection, which is kept already."""
    if settings.kernels.fused:
        return settings.element_bytes * queries
    copies_of_keys = 1 if settings.element_bytes == _FLOAT32 else 2
    return _FLOAT32 * (2 * queries + copies_of_keys * keys)


def _rope_bytes(architecture: Architecture, settings: PassSettings) -> float:
    """Sines and cosines, for queries and for keys; the fused kernel keeps one table for the model."""
    return 0 if settings.kernels.fused else 4 * settings.element_bytes * architecture.rotary_dim


def _sharded_tokens(layout: Layout, settings: PassSettings) -> float:
    """Tokens on one rank outside attention and feed-forward."""
    return settings.tokens / layout.tp if layout.sequence_parallel else settings.tokens
