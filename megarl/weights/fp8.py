"""Weights in blocks of 8-bit floats, as DeepSeek-V3 is published (arXiv:2412.19437, section 3.3.2).

Beside a float8_e4m3fn tensor `….weight` stands a float32 tensor `….weight_scale_inv` with one number for each block;
their product is the weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from megarl.config.errors import ConfigError
from megarl.weights.boxes import Box

FP8 = torch.float8_e4m3fn
_SCALE_SUFFIX = "_scale_inv"
_DEFAULT_BLOCK = (128, 128)


def block_size(folder: Path) -> tuple[int, int]:
    """Rows and columns of a block: `quantization_config.weight_block_size` of config.json, or DeepSeek's 128 × 128.

    Raises:
        ConfigError: config.json says something that is not two sizes.
    """
    file = folder / "config.json"
    settings = json.loads(file.read_text()).get("quantization_config") or {} if file.exists() else {}
    size = settings.get("weight_block_size", _DEFAULT_BLOCK)
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise ConfigError(f"{file} has weight_block_size {size!r}; weights in 8 bits need it to be two numbers above 0")
    return size[0], size[1]


def scale_names(
    weights: Mapping[str, tuple[int, ...]],
    all_shapes: Mapping[str, tuple[int, ...]],
    block: tuple[int, int],
    where: Path,
) -> dict[str, str]:
    """The tensor of scales of each 8-bit tensor.

    Args:
        weights: shapes of the 8-bit tensors.
        all_shapes: of all tensors of the folder.
        where: the folder that errors name.

    Raises:
        ConfigError: a tensor has no scales, or another number of them than its blocks.
    """
    found = {}
    for name, shape in weights.items():
        scale = name + _SCALE_SUFFIX
        if scale not in all_shapes:
            raise ConfigError(
                f"{where}: tensor {name} is in 8-bit floats, but there is no {scale} to give its values their size; "
                "copy the model again, or use one in bfloat16"
            )
        expected = tuple(-(-length // size) for length, size in zip(shape, block, strict=False))
        if len(shape) != 2 or all_shapes[scale] != expected:
            raise ConfigError(
                f"{where}: tensor {scale} has shape {list(all_shapes[scale])}, but {name} of shape {list(shape)} has "
                f"{list(expected)} blocks of {block[0]} × {block[1]}; weights and config.json are not of one model"
            )
        found[name] = scale
    return found


def dequantize(weight: torch.Tensor, scale: torch.Tensor, box: Box | None, block: tuple[int, int]) -> torch.Tensor:
    """float32 values of a box of a tensor.

    Args:
        weight: float8_e4m3fn, the box only.
        scale: float32 [row blocks, column blocks] of the whole tensor.
        box: where `weight` stands in the whole tensor; None: it is the whole.
    """
    (first_row, end_row), (first_column, end_column) = box or tuple((0, length) for length in weight.shape)
    columns = torch.arange(first_column, end_column) // block[1]
    values = weight.float()
    # A row of blocks at a time, so that the scales are never spread over a second tensor of this size.
    for block_row in range(first_row // block[0], -(-end_row // block[0])):
        start, stop = max(block_row * block[0], first_row), min((block_row + 1) * block[0], end_row)
        values[start - first_row : stop - first_row] *= scale[block_row, columns].float()
    return values
