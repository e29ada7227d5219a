"""Writes Hugging Face folders of safetensors, tensor after tensor.

The library's own writer wants all tensors of a file in memory at once. The format is eight bytes of little-endian
header length, a JSON header, then the tensors' bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.weights.files import WholeFile
from megarl.weights.safetensors_io import DTYPE_NAMES, INDEX_NAME, SINGLE_NAME, TensorInfo

MAX_FILE_BYTES = 5 * 10**9
"""transformers' own limit for one file."""


def plan_files(tensors: Mapping[str, TensorInfo], max_file_bytes: int = MAX_FILE_BYTES) -> dict[str, list[str]]:
    """Which tensors go into which file, in their order; a tensor larger than the limit has a file of its own."""
    parts: list[list[str]] = []
    size = 0
    for name, info in tensors.items():
        if not parts or size + info.num_bytes > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += info.num_bytes
    if len(parts) == 1:
        return {SINGLE_NAME: parts[0]}
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts)}


class SafetensorsFile:
    """One file, whose tensors are written one after another and none of them held."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        """Writes the header.

        Args:
            path: where the file appears once `finish` was called.
            tensors: what will be written, in that order.
        """
        self._tensors = tensors
        self._pending = iter(tensors)
        self._file = WholeFile(path)
        self._file.stream.write(_header(tensors))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Appends the next tensor.

        Raises:
            ValueError: not the next one, or of another shape or dtype.
        """
        if name != (expected := next(self._pending, None)):
            raise ValueError(f"{name} was written out of turn; next is {expected}")
        info = self._tensors[name]
        if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, planned as {info}")
        # Bytes are taken through a view of the storage: `numpy` knows no bfloat16.
        self._file.stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    def finish(self) -> None:
        """Syncs the file to the disk and gives it its name.

        Raises:
            ValueError: tensors were not written.
        """
        if (missing := next(self._pending, None)) is not None:
            raise ValueError(f"{missing} was not written")
        self._file.finish()

    def abandon(self) -> None:
        """Removes what was begun."""
        self._file.abandon()


def write_index(folder: Path, files: Mapping[str, Sequence[str]], tensors: Mapping[str, TensorInfo]) -> None:
    """Writes the index, which a folder of several files has."""
    if len(files) == 1:
        return
    total = sum(info.num_bytes for info in tensors.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _header(tensors: Mapping[str, TensorInfo]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in tensors.items():
        entries[name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.num_bytes],
        }
        offset += info.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight bytes, as the library writes them
    return len(text).to_bytes(8, "little") + text
