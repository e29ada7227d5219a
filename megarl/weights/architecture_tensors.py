"""Names and shapes of a model's Hugging Face tensors, from a source that knows nothing of Megatron."""

from __future__ import annotations

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from megarl.models.build import Role

Shape = tuple[int, ...]


def architecture_tensors(hf_config: transformers.PretrainedConfig, role: Role) -> dict[str, Shape]:
    """Names and shapes of what transformers would save: its own model class, built without memory.

    transformers 5 keeps the experts of a layer in one tensor and writes them one by one, under the names that engines
    and other trainers read; so do we. A tied output layer is not saved. A second for the 45,395 tensors of DeepSeek-V3.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    saved = revert_weight_conversion(model, model.state_dict())
    tensors = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if role is not Role.CAUSAL_LM or hf_config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if role is not Role.CAUSAL_LM:
        tensors["score.weight"] = (1, hf_config.hidden_size)
    if role is Role.CRITIC:
        tensors["score.bias"] = (1,)
    return tensors
