"""What the verification of a model with a wrong weight finds, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.checkpoint.ranks import fresh_model, groups_of, load_hf
from tests.launch import ROOT

sys.path.insert(0, str(ROOT / "tools" / "convert"))  # as Python does for the scripts there


def verify_with_wrong_weights(hf: Path, offsets: list[float]) -> list[tuple[list[str], float]]:
    """Adds each offset to one element of a norm: which tensors differ, and the distance of the logits ÷ their limit."""
    from logits import compare_logits
    from verification import compare_with_source

    groups = groups_of()
    found = []
    for offset in offsets:

        def load(dtype: torch.dtype, offset: float = offset):  # type: ignore[no-untyped-def]
            model = fresh_model(hf, groups, dtype=dtype)
            load_hf(model, hf)
            with torch.no_grad():
                model.chunks[0].decoder.final_layernorm.weight[3] += offset
            return model

        logits = compare_logits(load, hf, torch.float32)
        different = compare_with_source(load(torch.float32), hf).different
        found.append((different, logits["max_abs_difference"] / logits["limit"]))
    return found
