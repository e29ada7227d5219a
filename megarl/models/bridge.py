"""mbridge, corrected: from a Hugging Face config to a Megatron-Core config, and from parameter names to tensor names.

Every correction of mbridge 0.15.1 that megarl needs is here. Each was found by comparing logits with transformers, and
mbridge reports none of them itself; `tests/models/test_parity.py` compares them again.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from megarl import platform
from megarl.config.errors import ConfigError
from megarl.config.model_shape import ModelShape
from megarl.parallel.groups import Groups


def read_hf_config(path: str | Path) -> PretrainedConfig:
    """The Hugging Face config of a model folder, checked to be of a supported kind.

    Raises:
        ConfigError: missing, unreadable or unsupported (the supported ones are listed).
    """
    ModelShape.from_hf(path)
    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{path}/config.json is refused by transformers ({reason}): correct or copy it.") from None


def make_bridge(
    hf_config: PretrainedConfig, groups: Groups, dtype: torch.dtype, *, overrides: dict[str, Any] | None = None
) -> Any:
    """An mbridge `Bridge` for this rank.

    Args:
        hf_config: as `read_hf_config` gives it; it is not changed.
        dtype: of the parameters.
        overrides: TransformerConfig fields that win over everything else, such as recomputation.
    """
    from mbridge.core.bridge import _MODEL_REGISTRY

    family = hf_config.model_type
    layout = groups.layout
    settings = {
        **platform.current().megatron_overrides(),
        # RL needs log-probs that a second pass reproduces.
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "sequence_parallel": layout.sequence_parallel,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        # Micro-batches of a step have one padded length, so stages need not send shapes ahead of tensors.
        "variable_seq_lengths": False,
        # Without this Megatron-Core divides the loss by the number of micro-batches and multiplies it by the
        # context-parallel size; megarl's losses are already divided by the global mini-batch.
        "calculate_per_token_loss": True,
        # Weights come from a checkpoint, so nothing is drawn. `perform_initialization=False` would say the same, but
        # then Megatron-Core's linear layers do not mark their weights as sharded either.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        **_family_settings(hf_config),
        **(overrides or {}),
    }
    bridge_class = _corrected_class(_MODEL_REGISTRY[family], hf_config, settings)
    return bridge_class(
        _config_for_mbridge(hf_config),
        dtype=dtype,
        parallel_states=_parallel_states(groups),
        make_vocab_size_divisible_by=layout.tp,
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


_ROUTER = {
    # mbridge sets these for each family in its own way: an auxiliary loss for glm4_moe, expert biases that move with
    # every step for deepseek_v3 (`model.moe_router_bias_update_rate` is megarl's key), routers in bfloat16 for qwen.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_dtype": "fp32",
}


def _family_settings(hf_config: PretrainedConfig) -> dict[str, Any]:
    family = hf_config.model_type
    if family == "mixtral":
        # mbridge says True, which is off by 2.0 in logits.
        return {**_ROUTER, "moe_router_pre_softmax": False}
    if family == "qwen3_moe":
        return {**_ROUTER, **_softmax_routing(hf_config)}
    if family == "qwen2_moe":
        # mbridge leaves the shared expert's gate out: off by 1.6 in logits. Megatron-Core does not overlap with a gate.
        gate = {"moe_shared_expert_gate": True, "moe_shared_expert_overlap": False}
        return {**_ROUTER, **_softmax_routing(hf_config), **gate}
    if family == "glm4_moe":
        # mbridge takes the shared experts for one, whatever their number.
        shared_width = hf_config.n_shared_experts * hf_config.moe_intermediate_size
        return {**_ROUTER, **_sigmoid_routing(hf_config), "moe_shared_expert_intermediate_size": shared_width}
    if family == "deepseek_v3":
        from megatron.core.transformer.enums import AttnBackend

        return {
            **_ROUTER,
            **_sigmoid_routing(hf_config),
            **_mla_rope(hf_config),
            # `fused` exists on a GPU only. The multi-token-prediction layers are not trained.
            "attention_backend": AttnBackend.auto,
            "mtp_num_layers": None,
        }
    return {}


def _softmax_routing(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Weights that are a softmax over all experts, or over the chosen ones (`norm_topk_prob`). mbridge fixes one."""
    return {"moe_router_pre_softmax": not hf_config.norm_topk_prob}


def _sigmoid_routing(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Experts are chosen within the best groups (arXiv:2412.19437, 2.1.2). mbridge leaves that out.

    Raises:
        ConfigError: weights that do not add up to one, which Megatron-Core always makes them with several experts and
            never with one; a group that is rated by another number of its experts than the two transformers adds up.
    """
    if hf_config.norm_topk_prob != (hf_config.num_experts_per_tok > 1):
        raise ConfigError(
            f"norm_topk_prob {hf_config.norm_topk_prob} with num_experts_per_tok {hf_config.num_experts_per_tok} is "
            f"not supported for {hf_config.model_type}; supported: true with several experts, false with one"
        )
    groups, chosen = hf_config.n_group, hf_config.topk_group
    if groups == 1:
        return {}
    per_group = hf_config.num_experts_per_tok // chosen
    if per_group != 2:
        raise ConfigError(
            f"num_experts_per_tok {hf_config.num_experts_per_tok} with topk_group {chosen} makes Megatron-Core rate a "
            f"group by its best {per_group} experts, where the model means 2; such routing is not supported"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _mla_rope(hf_config: PretrainedConfig) -> dict[str, Any]:
    """transformers 5's `rope_parameters` for MLA: mbridge asks for `rope_scaling`, which is no longer a key."""
    rope = hf_config.rope_parameters
    if rope["rope_type"] == "default":
        return {"rope_type": "rope"}
    if rope["rope_type"] != "yarn":
        raise ConfigError(f"rope_type {rope['rope_type']!r} is not supported for deepseek_v3; supported: default, yarn")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast", 32),
        "beta_slow": rope.get("beta_slow", 1),
        "mscale": rope.get("mscale", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
    }


def _corrected_class(base: type, hf_config: PretrainedConfig, settings: dict[str, Any]) -> type:
    """A subclass of mbridge's class for one model; mbridge's own classes stay as they are."""
    # mbridge's qwen2 family writes a tied model's mapping into the class, where the next, untied model finds it;
    # its llama and others do not know of tied embeddings at all. A mapping of the instance's own serves both.
    direct = dict(base._DIRECT_MAPPING)  # type: ignore[attr-defined]
    if getattr(hf_config, "tie_word_embeddings", False):
        direct["output_layer.weight"] = "model.embed_tokens.weight"

    def build_base_config(self: Any, text_config_key: str | None = None, **kwargs: Any) -> Any:
        return super(corrected, self)._build_base_config(text_config_key, **{**kwargs, **settings})

    attributes: dict[str, Any] = {
        "_DIRECT_MAPPING": direct,
        "_adjust_mapping_for_shared_weights": lambda self: None,
        "_build_base_config": build_base_config,
    }
    if hf_config.model_type == "deepseek_v3":
        attributes["TransformerConfigClass"] = staticmethod(_mla_config)
    corrected = type(base.__name__, (base,), attributes)
    return corrected


def _mla_config(max_position_embeddings: int = 0, **kwargs: Any) -> Any:
    """mbridge passes a field that Megatron-Core 0.16 no longer has; `_mla_rope` sets the one it has now."""
    from megatron.core.transformer import MLATransformerConfig

    return MLATransformerConfig(**kwargs)


def _config_for_mbridge(hf_config: PretrainedConfig) -> PretrainedConfig:
    """transformers 5 keeps RoPE settings in `rope_parameters`; mbridge reads the names of transformers 4."""
    config = copy.deepcopy(hf_config)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope and getattr(config, name, None) is None:
            setattr(config, name, rope[name])
    # mbridge's llama takes any scaling for a linear one; `rope_frequencies` and `_mla_rope` serve instead.
    config.rope_scaling = None
    return config


def _parallel_states(groups: Groups) -> Any:
    from mbridge.core.parallel_states import ParallelStates

    layout = groups.layout
    return ParallelStates(
        tp_size=layout.tp,
        tp_rank=groups.tp.rank(),
        pp_size=layout.pp,
        pp_rank=groups.pp.rank(),
        vpp_size=layout.vpp if layout.vpp > 1 else None,
        cp_size=layout.cp,
        cp_rank=groups.cp.rank(),
        ep_size=layout.ep,
        ep_rank=groups.ep.rank(),
        etp_size=layout.etp,
        etp_rank=groups.etp.rank(),
        tp_group=groups.tp,
        pp_group=groups.pp,
        cp_group=groups.cp,
        ep_group=groups.ep,
        etp_group=groups.etp,
    )


def rope_frequencies(hf_config: PretrainedConfig) -> torch.Tensor | None:
    """Inverse RoPE frequencies as transformers computes them; None for MLA, whose RoPE Megatron-Core takes whole.

    Megatron-Core's own formula knows `default`, `linear` and one set of `llama3` constants; mbridge asks it for
    `linear` whatever the model says. Taking transformers' frequencies covers every kind that only rescales them.

    Raises:
        ConfigError: a kind that also rescales the embedding (yarn, longrope) or changes with length (dynamic).
    """
    if hf_config.model_type == "deepseek_v3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(hf_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if kind not in ("linear", "llama3"):
        raise ConfigError(
            f"rope_type {kind!r} is not supported for {hf_config.model_type}; supported: default, linear, llama3"
        )
    frequencies, attention_scaling = ROPE_INIT_FUNCTIONS[kind](hf_config, device=torch.device("cpu"))
    if attention_scaling != 1.0:
        raise ConfigError(f"rope_type {kind!r} scales attention by {attention_scaling}, which is not supported")
    return frequencies
