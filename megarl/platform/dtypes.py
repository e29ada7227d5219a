"""Which parameter dtypes a run may name."""

from __future__ import annotations

import torch

_NAMES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name` (`float32`/`fp32`, `bfloat16`/`bf16`).

    float16 is refused: RL gradients span more than its range, and no loss scaler is kept here for it.

    Raises:
        ValueError: for any other name.
    """
    try:
        return _NAMES[name]
    except KeyError:
        raise ValueError(f"dtype {name!r} is not supported; use float32 or bfloat16") from None
