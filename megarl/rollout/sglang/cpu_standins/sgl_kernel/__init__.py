"""Stand-in for `sgl_kernel`, whose wheels are CUDA only: its functions exist, and raise when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

if torch.cuda.is_available():
    raise ImportError(
        "this sgl_kernel is megarl's stand-in for machines without CUDA, and this machine has CUDA: "
        "install the real one with  pip install -e '.[sglang]'"
    )

__version__ = "0.4.10"  # of the sglang-kernel that SGLang 0.5.23 pins; SGLang compares it


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel, and this is its stand-in on a CPU")

    return missing
