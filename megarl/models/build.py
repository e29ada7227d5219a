"""Builds this rank's part of a model in a layout."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from transformers import PretrainedConfig

from megarl import platform
from megarl.config.schema_inputs import ModelConfig
from megarl.models.backends import layer_backend, resolve_backend
from megarl.models.bridge import make_bridge, rope_frequencies
from megarl.models.heads import LogitSelector, ScalarHead
from megarl.models.router import count_real_tokens
from megarl.models.router_hook import install_router_hooks
from megarl.parallel.groups import Groups


class Role(StrEnum):
    """What a model is for, which decides its head."""

    CAUSAL_LM = "causal_lm"
    """Actor or reference: vocabulary logits (`AutoModelForCausalLM`)."""
    CRITIC = "critic"
    """A value for each token, with a bias (`AutoModelForTokenClassification`, one label)."""
    REWARD = "reward"
    """A score for each token, read at the last (`AutoModelForSequenceClassification`, one label)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronModel:
    """This rank's chunks of one model, and what is needed to run, load and export them."""

    chunks: list[GPTModel]
    """One for each virtual pipeline stage of this rank."""
    role: Role
    hf_config: PretrainedConfig
    bridge: Any
    """mbridge's `Bridge`, corrected; its config is `config`."""
    groups: Groups
    dtype: torch.dtype
    selector: LogitSelector | None
    """Of the output layer, on the last stage of a language model."""

    @property
    def config(self) -> Any:
        """Megatron-Core's TransformerConfig."""
        return self.bridge.config

    @property
    def vocab_size(self) -> int:
        """Tokens of the model, without the padding that tensor parallelism may add."""
        return self.hf_config.vocab_size

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.role is Role.CAUSAL_LM and bool(getattr(self.hf_config, "tie_word_embeddings", False))

    def num_parameters(self) -> int:
        """Parameters on this rank."""
        return sum(parameter.numel() for chunk in self.chunks for parameter in chunk.parameters())


def build_model(
    hf_config: PretrainedConfig,
    groups: Groups,
    *,
    role: Role = Role.CAUSAL_LM,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    overrides: dict[str, Any] | None = None,
    device: str | None = None,
) -> MegatronModel:
    """Builds this rank's chunks, on its device, with weights not yet set.

    Args:
        hf_config: as `bridge.read_hf_config` gives it.
        backend: `auto`, `te` or `torch` (`models.backends`).
        overrides: TransformerConfig fields that win over everything else; `config_overrides` gives some.
        device: None: this rank's own. `meta`, inside `torch.device("meta")`: shapes and names without memory.

    Raises:
        ValueError: the layer backend cannot serve here.
        ConfigError: a RoPE kind that is not supported.
    """
    device = device or platform.current().device
    with torch.device("cpu"):  # transformers copies them there, which fails where the caller builds on `meta`
        frequencies = rope_frequencies(hf_config)
    bridge = make_bridge(hf_config, groups, dtype, overrides=overrides)
    virtual_size = groups.layout.vpp
    chunks = []
    with layer_backend(resolve_backend(backend)):
        for stage in range(virtual_size):
            chunk = _build_chunk(bridge, groups, role, stage if virtual_size > 1 else None)
            if frequencies is not None:
                chunk.rotary_pos_emb.inv_freq = frequencies.to(device)
            chunks.append(chunk.to(device))
    has_logits = role is Role.CAUSAL_LM and chunks[-1].post_process
    return MegatronModel(
        chunks=chunks,
        role=role,
        hf_config=hf_config,
        bridge=bridge,
        groups=groups,
        dtype=dtype,
        selector=LogitSelector(chunks[-1].output_layer, bridge.config) if has_logits else None,
    )


def _build_chunk(bridge: Any, groups: Groups, role: Role, virtual_stage: int | None) -> GPTModel:
    size, config = groups.layout.vpp, bridge.config
    first = is_pp_first_stage(groups.pp) and virtual_stage in (None, 0)
    last = is_pp_last_stage(groups.pp) and virtual_stage in (None, size - 1)
    arguments = bridge._get_gptmodel_args()
    vocab_size = arguments.pop("vocab_size")
    multiple = groups.layout.tp
    tied = role is Role.CAUSAL_LM and bool(getattr(bridge.hf_config, "tie_word_embeddings", False))
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=bridge._get_transformer_layer_spec(virtual_stage),
        vocab_size=-(-vocab_size // multiple) * multiple,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=tied,
        vp_stage=virtual_stage,
        pg_collection=groups.megatron,
        **arguments,
    )
    if last and role is not Role.CAUSAL_LM:
        chunk.output_layer = ScalarHead(config, bias=role is Role.CRITIC)
    for name, parameter in chunk.named_parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if ".mlp.experts." in name:
            # Expert gradients are reduced over the expert-data-parallel group. Megatron-Core's layers say so only when
            # EP > 1; with EP = 1 and ETP < TP that leaves them silently wrong, so here it is always said.
            parameter.allreduce = False
    count_real_tokens(chunk)
    install_router_hooks(chunk)
    return chunk


def config_overrides(config: ModelConfig) -> dict[str, Any]:
    """The TransformerConfig fields of the `model` section, for `build_model`."""
    return {"moe_router_bias_update_rate": config.moe_router_bias_update_rate, **_recompute_overrides(config)}


def _recompute_overrides(config: ModelConfig) -> dict[str, Any]:
    if config.recompute_granularity == "none":
        return {}
    if config.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": config.recompute_method,
        "recompute_num_layers": config.recompute_num_layers,
    }
