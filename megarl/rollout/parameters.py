"""Where each tensor of a Hugging Face checkpoint lies in a transformers model.

transformers 5 keeps all experts of a layer in two parameters, while checkpoints, and so the export stream, have three
tensors for each expert; Mixtral's checkpoints also name things in their own way.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from megarl.models.bridge import read_hf_config

_FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<kind>gate_up_proj|down_proj)$")
_MIXTRAL_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Views of the model's memory under the names that its checkpoint has; writing to them sets the weights.

    A tied output layer is not listed: its checkpoint has the embedding only.
    """
    parameters = model.state_dict()
    if model.config.tie_word_embeddings:
        parameters.pop("lm_head.weight")
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors.update(_unfuse(name, parameter))
    if model.config.model_type == "mixtral":
        return {_mixtral_name(name): tensor for name, tensor in tensors.items()}
    return tensors


def checkpoint_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the checkpoint of the model in a Hugging Face folder, by name; no weights are read."""
    with no_init_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_hf_config(folder))
    return {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(model).items()}


def _unfuse(name: str, parameter: Tensor) -> dict[str, Tensor]:
    match = _FUSED.match(name)
    if match is None:
        return {name: parameter}
    tensors = {}
    for expert, matrix in enumerate(parameter):
        if match["kind"] == "down_proj":
            parts = {"down_proj": matrix}
        else:
            gate, up = matrix.chunk(2)  # [2 × intermediate, hidden]
            parts = {"gate_proj": gate, "up_proj": up}
        for projection, part in parts.items():
            tensors[f"{match['experts']}.{expert}.{projection}.weight"] = part
    return tensors


def _mixtral_name(name: str) -> str:
    before, found, after = name.partition(".mlp.")
    if not found:
        return name
    for projection, short in _MIXTRAL_EXPERT.items():
        after = after.replace(f".{projection}.", f".{short}.")
    return f"{before}.block_sparse_moe.{after}"
