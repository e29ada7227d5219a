"""Tiny Hugging Face models with random weights, one for each supported family, saved as a user's folder would be."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

VOCAB = 262  # not divisible by 4: tensor-parallel layouts pad it

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

DENSE = ("llama", "llama_tied", "llama3_rope", "qwen2", "qwen2_tied", "qwen3")
MOE = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3")


def hf_config(name: str) -> transformers.PretrainedConfig:
    """The config of one of DENSE or MOE."""
    makers = {
        "llama": lambda: transformers.LlamaConfig(**_BASE, head_dim=16),
        "llama_tied": lambda: transformers.LlamaConfig(**{**_BASE, "tie_word_embeddings": True}, head_dim=16),
        "llama3_rope": lambda: transformers.LlamaConfig(**_BASE, head_dim=16, rope_parameters=_LLAMA3_ROPE),
        "qwen2": lambda: transformers.Qwen2Config(**_BASE),
        "qwen2_tied": lambda: transformers.Qwen2Config(**{**_BASE, "tie_word_embeddings": True}),
        "qwen3": lambda: transformers.Qwen3Config(**_BASE, head_dim=32),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **_BASE, **_MOE, head_dim=32, num_experts=4, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]
        ),
        "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
            **_BASE,
            **_MOE,
            num_experts=4,
            shared_expert_intermediate_size=64,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        "mixtral": lambda: transformers.MixtralConfig(**_BASE, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
        "glm4_moe": lambda: transformers.Glm4MoeConfig(
            **_BASE,
            **_MOE,
            attention_bias=True,
            head_dim=16,
            partial_rotary_factor=0.5,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            norm_topk_prob=True,
            use_qk_norm=True,
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **{**_BASE, "num_key_value_heads": 4},
            **_MOE,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=2.5,
            num_nextn_predict_layers=0,
            rope_parameters=_YARN_ROPE,
        ),
    }
    return makers[name]()


def make_hf_model(
    name: str,
    folder: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    auto_class: type = transformers.AutoModelForCausalLM,
    **changes: object,
) -> Path:
    """Saves a random model of a family as a Hugging Face folder. Weights are large enough for every part to matter."""
    config = hf_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = auto_class.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.1)
        for buffer_name, buffer in model.named_buffers():
            if "e_score_correction_bias" in buffer_name:
                buffer.normal_(0, 0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)


def make_scalar_model(source: Path, folder: Path) -> Path:
    """A critic beside the language model in `source`: of its sizes, with random weights and head; returns `folder`."""
    config = transformers.AutoConfig.from_pretrained(source, num_labels=1)
    torch.manual_seed(5)
    model = transformers.AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
