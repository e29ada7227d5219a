"""The tensors of a model in a layout, from its config alone."""

from __future__ import annotations

import torch
import transformers

from megarl.config.layout import Layout
from megarl.models.build import Role
from megarl.weights.architecture_tensors import architecture_tensors
from megarl.weights.placement import Heads, PlacedTensor, place_tensors


def heads(config: transformers.PretrainedConfig) -> Heads:
    counts = (getattr(config, name, None) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    return Heads(
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        key_value_groups=config.num_key_value_heads,
        experts=next(filter(None, counts), 0),
    )


def placed(config: transformers.PretrainedConfig, layout: Layout) -> list[PlacedTensor]:
    return place_tensors(architecture_tensors(config, Role.CAUSAL_LM), layout, heads(config), torch.bfloat16)
