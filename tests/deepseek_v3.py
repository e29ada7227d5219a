"""DeepSeek-V3 (arXiv:2412.19437) with its number of layers and experts, and small widths.

Its 45,000 tensors are written from the names of the published folder, a file for each layer: neither transformers nor
megarl's map of names has a part in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

LAYERS, DENSE_LAYERS, EXPERTS = 61, 3, 256
_HEADS, _NOPE, _ROPE, _VALUE, _Q_RANK, _KV_RANK = 2, 8, 8, 8, 16, 16


def make_deepseek_v3(
    folder: Path,
    *,
    hidden: int = 16,
    expert: int = 8,
    vocab: int = 256,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    seed: int = 0,
) -> Path:
    """Writes the folder, in bfloat16 but for the routers' biases; returns it.

    Args:
        hidden: width of the model.
        expert: width of one expert.
    """
    folder.mkdir(parents=True)
    config = transformers.DeepseekV3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        moe_intermediate_size=expert,
        num_hidden_layers=layers,
        first_k_dense_replace=DENSE_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        q_lora_rank=_Q_RANK,
        kv_lora_rank=_KV_RANK,
        qk_nope_head_dim=_NOPE,
        qk_rope_head_dim=_ROPE,
        v_head_dim=_VALUE,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        max_position_embeddings=256,
        num_nextn_predict_layers=0,
        architectures=["DeepseekV3ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    weight_map = {}
    for number, shapes in enumerate(_files(config)):
        tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
        file = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator) * 0.1
    if name.endswith("e_score_correction_bias"):
        return values
    return (values + 1 if "norm" in name else values).to(torch.bfloat16)


def _files(config: transformers.DeepseekV3Config) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of each file's tensors."""
    hidden, vocab = config.hidden_size, config.vocab_size
    ends = {"embed_tokens": (vocab, hidden), "norm": (hidden,)}
    yield {f"model.{name}.weight": shape for name, shape in ends.items()} | {"lm_head.weight": (vocab, hidden)}
    for layer in range(config.num_hidden_layers):
        yield {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config, layer)}


def _layer(config: transformers.DeepseekV3Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, experts = config.hidden_size, config.n_routed_experts
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", (hidden,)
    yield "self_attn.q_a_proj.weight", (_Q_RANK, hidden)
    yield "self_attn.q_a_layernorm.weight", (_Q_RANK,)
    yield "self_attn.q_b_proj.weight", (_HEADS * (_NOPE + _ROPE), _Q_RANK)
    yield "self_attn.kv_a_proj_with_mqa.weight", (_KV_RANK + _ROPE, hidden)
    yield "self_attn.kv_a_layernorm.weight", (_KV_RANK,)
    yield "self_attn.kv_b_proj.weight", (_HEADS * (_NOPE + _VALUE), _KV_RANK)
    yield "self_attn.o_proj.weight", (hidden, _HEADS * _VALUE)
    if layer < DENSE_LAYERS:
        yield from _mlp("mlp", hidden, config.intermediate_size)
        return
    yield "mlp.gate.weight", (experts, hidden)
    yield "mlp.gate.e_score_correction_bias", (experts,)
    yield from _mlp("mlp.shared_experts", hidden, config.moe_intermediate_size)
    for expert in range(experts):
        yield from _mlp(f"mlp.experts.{expert}", hidden, config.moe_intermediate_size)


def _mlp(name: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (width, hidden)
    yield f"{name}.up_proj.weight", (width, hidden)
    yield f"{name}.down_proj.weight", (hidden, width)
