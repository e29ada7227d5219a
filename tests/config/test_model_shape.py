"""Shapes are read from the config.json that transformers writes, for every supported family."""

import json

import pytest
import transformers

from megarl.config import SUPPORTED_MODEL_TYPES, ConfigError, ModelShape

COMMON = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
SPECIAL = {
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "head_dim": 32},
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "mixtral": {"num_local_experts": 8},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "head_dim": 16},
    "deepseek_v3": {**EXPERTS, **LATENT, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 3},
}
# experts, expert width, shared width, dense layers, head width
EXPECTED = {
    "llama": (0, 0, 0, 4, 16),
    "qwen2": (0, 0, 0, 4, 16),
    "qwen3": (0, 0, 0, 4, 32),
    "qwen3_moe": (8, 32, 0, 0, 32),
    "qwen2_moe": (8, 32, 48, 0, 16),
    "mixtral": (8, 128, 0, 0, 16),
    "glm4_moe": (8, 32, 64, 1, 16),
    "deepseek_v3": (8, 32, 64, 3, 24),
}


def write(folder, **values):
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def llama(**changes):
    return {"model_type": "llama", **COMMON} | changes


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_a_saved_config_of_each_supported_family_is_read(model_type, tmp_path):
    config = transformers.AutoConfig.for_model(model_type, **COMMON, **SPECIAL.get(model_type, {}))
    config.save_pretrained(tmp_path)
    shape = ModelShape.from_hf(tmp_path)
    assert (shape.model_type, shape.num_layers, shape.hidden_size, shape.vocab_size) == (model_type, 4, 64, 257)
    assert (shape.num_heads, shape.num_kv_heads, shape.max_positions, shape.tied) == (4, 2, 512, False)
    experts = (shape.num_experts, shape.moe_ffn_size, shape.shared_ffn_size, shape.num_dense_layers, shape.head_dim)
    assert experts == EXPECTED[model_type]
    assert shape.is_moe == (shape.num_experts > 0)


def test_tied_embeddings_are_seen(tmp_path):
    assert ModelShape.from_hf(write(tmp_path, **llama(tie_word_embeddings=True))).tied


def test_an_old_llama_without_key_value_heads_has_as_many_as_query_heads(tmp_path):
    config = llama()
    del config["num_key_value_heads"]
    assert ModelShape.from_hf(write(tmp_path, **config)).num_kv_heads == 4


def glm4_moe(**changes):
    return llama(model_type="glm4_moe", **SPECIAL["glm4_moe"] | changes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (llama(model_type="gpt2"), ["'gpt2'", "not supported", *SUPPORTED_MODEL_TYPES]),
        (llama(num_hidden_layers=None), ["num_hidden_layers", "llama"]),
        (llama(num_attention_heads="four"), ["num_attention_heads='four'", "whole number"]),
        (llama(num_key_value_heads=0), ["num_key_value_heads=0", "at least 1"]),
        (llama(hidden_act="gelu"), ["hidden_act='gelu'"]),
        (llama(model_type="qwen2", use_sliding_window=True), ["sliding-window"]),
        (llama(model_type="mixtral", num_local_experts=8, sliding_window=4096), ["sliding-window"]),
        (llama(model_type="qwen3_moe", **EXPERTS, num_experts=8, mlp_only_layers=[0]), ["only some layers"]),
        (llama(model_type="qwen3_moe", **EXPERTS, num_experts=1), ["num_experts_per_tok=2", "only 1 experts"]),
        (glm4_moe(first_k_dense_replace=5), ["first_k_dense_replace=5", "4 layers"]),
        (glm4_moe(n_group=3), ["8 experts", "n_group=3", "divide"]),
        (glm4_moe(n_group=2, topk_group=4), ["n_group=2", "topk_group=4"]),
        (llama(tie_word_embeddings="no"), ["tie_word_embeddings='no'", "true or false"]),
    ],
)
def test_what_cannot_be_right_is_one_sentence_with_the_file(config, words, tmp_path):
    with pytest.raises(ConfigError) as refusal:
        ModelShape.from_hf(write(tmp_path, **config))
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(refusal.value)


def test_a_window_that_is_switched_off_is_no_window(tmp_path):
    write(tmp_path, **llama(model_type="qwen2", use_sliding_window=False, sliding_window=4096))
    assert ModelShape.from_hf(tmp_path).model_type == "qwen2"


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        ModelShape.from_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        ModelShape.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds a JSON list"):
        ModelShape.from_hf(tmp_path)
