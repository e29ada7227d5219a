"""Seconds that a pass spends moving activations between ranks. Nothing is taken to overlap with computing."""

from __future__ import annotations

from megarl.config.layout import Layout
from megarl.planning.architecture import Architecture
from megarl.planning.hardware import COLLECTIVE_EFFICIENCY, GPU, GPUS_A_NODE


def group_rate(gpu: GPU, ranks_spanned: int) -> float:
    """Bytes a second of collectives in a group whose ranks lie within `ranks_spanned` consecutive ones."""
    return (gpu.link if ranks_spanned <= GPUS_A_NODE else gpu.network) * COLLECTIVE_EFFICIENCY


def forward_seconds(architecture: Architecture, layout: Layout, gpu: GPU, element_bytes: int, tokens: float) -> float:
    """Of a forward pass of one data-parallel rank over `tokens` tokens, on each of its ranks.

    A backward pass moves as much: gradients go the other way.
    """
    shape = architecture.shape
    of_rank = tokens / layout.cp
    layers = shape.num_layers / layout.pp
    moe_layers = sum(architecture.layer_kinds()) / layout.pp
    hidden = element_bytes * shape.hidden_size
    # Attention and a dense feed-forward each gather all tokens and scatter their sum; experts have tokens sent instead.
    gathers = 2 * (2 * layers - moe_layers)
    tensor = gathers * of_rank * hidden * _others(layout.tp) / group_rate(gpu, layout.tp)
    keys = 2 * architecture.shape.query_width if architecture.shape.latent else 2 * architecture.shape.key_value_width
    context = layers * tokens * element_bytes * keys / layout.tp * _others(layout.cp)
    context /= group_rate(gpu, layout.tp * layout.cp)
    own = of_rank / layout.tp
    sent = own * shape.experts_per_token * hidden * _others(layout.ep) * layout.etp
    gathered = own * shape.experts_per_token * hidden * (layout.etp - 1)
    expert = 2 * moe_layers * sent / group_rate(gpu, layout.etp * layout.ep)
    expert += 2 * moe_layers * gathered / group_rate(gpu, layout.etp)
    return tensor + context + expert


def _others(size: int) -> float:
    """Share of what a group holds that lies on other ranks."""
    return (size - 1) / size
