"""One global batch trained on in many layouts, and the same batch in transformers."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.distributed.train_step import global_batch
from tests.launch import torchrun

TOLERANCE = 1e-5
LAYOUTS_A_PROCESS = 4
"""Groups of a layout that is gone keep their gloo threads."""


def train_in_layouts(ranks: int, cases: Sequence[dict[str, Any]], models: Path, results: Path) -> None:
    """Two optimizer steps of each case; `load` gives what came out."""
    for start in range(0, len(cases), LAYOUTS_A_PROCESS):
        part = json.dumps(cases[start : start + LAYOUTS_A_PROCESS])
        torchrun(ranks, "tests/distributed/train_step.py", models, results, part, timeout=280)


def load(results: Path, layout: str, model: str, distributed: bool) -> dict:
    return torch.load(results / f"{layout}-{model}-{distributed}.pt")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 distance over L2 norm."""
    return ((found - expected).norm() / expected.norm()).item()


def worst(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, leave_out: str = "\0"
) -> tuple[float, str]:
    """The largest relative distance and its tensor.

    Args:
        leave_out: how names end that are not compared.
    """
    assert found.keys() == expected.keys()
    distances = {name: relative(found[name], t) for name, t in expected.items() if not name.endswith(leave_out)}
    unknown = [name for name, distance in distances.items() if math.isnan(distance)]
    assert not unknown, unknown
    return max((distance, name) for name, distance in distances.items())


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )


def transformers_loss(model: transformers.PreTrainedModel) -> torch.Tensor:
    """The loss of the program `train_step`, one sequence at a time."""
    sequences = global_batch(model.config.vocab_size)
    total = sum(len(sequence) - 1 for sequence in sequences)
    loss = torch.zeros(())
    for sequence in sequences:
        logprobs = model(sequence[None]).logits[0, :-1].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss = loss - (logprobs.gather(1, sequence[1:, None])[:, 0] + 0.1 * entropy).sum() / total
    return loss


def checkpoint_gradients(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gradients under the names of a checkpoint: transformers fuses experts, and takes them apart when it saves."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
    return {name: tensor for name, tensor in saved.items() if not name.endswith("e_score_correction_bias")}
