"""Reads boxes of tensors from Hugging Face folders of safetensors.

It goes through the safetensors library, which maps files into memory, so only the asked-for box is copied.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megarl.config.errors import ConfigError
from megarl.weights.boxes import Box, box_index
from megarl.weights.fp8 import FP8, block_size, dequantize, scale_names

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_OPEN_FILES = 8
"""Files that stay mapped. Pages of a mapped file count as this process's memory once they were read, so that a model of
hundreds of files would count whole. Parameters are filled about in the files' order: few files are enough."""

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {"F8_E4M3": FP8}  # read, never written


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a tensor is, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


class SafetensorsReader:
    """The tensors of a Hugging Face folder, in one file or many.

    A tensor in blocks of 8-bit floats (`weights.fp8`) is a float32 tensor to whoever asks: it is read together with its
    scales, which are no tensors of their own.
    """

    def __init__(self, folder: str | Path) -> None:
        """Opens every file and reads the headers.

        Raises:
            ConfigError: no safetensors, a file that is missing or truncated, an index that does not fit its files,
                8-bit floats without their scales.
        """
        self.folder = Path(folder)
        self._files: OrderedDict[str, Any] = OrderedDict()
        self._info: dict[str, TensorInfo] = {}
        self._file_of = self._locate()
        for name, file in self._file_of.items():
            self._info[name] = _tensor_info(self._open(file), name, self.folder / file)
        self._scale_of: dict[str, str] = {}
        self._take_scales()

    def _take_scales(self) -> None:
        shapes = {name: info.shape for name, info in self._info.items()}
        quantized = {name: info.shape for name, info in self._info.items() if info.dtype == FP8}
        if not quantized:
            return
        self._block = block_size(self.folder)
        self._scale_of = scale_names(quantized, shapes, self._block, self.folder)
        for name, scale in self._scale_of.items():
            self._info[name] = TensorInfo(shapes[name], torch.float32)
            del self._info[scale]

    def _locate(self) -> dict[str, str]:
        """The file of each tensor."""
        index_path = self.folder / INDEX_NAME
        if index_path.exists():
            try:
                weight_map = json.loads(index_path.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{index_path} is not a safetensors index ({error!r}); copy the model again"
                ) from None
            for file in sorted(set(weight_map.values())):
                if not (self.folder / file).exists():
                    raise ConfigError(f"{index_path} names {file}, which is not in {self.folder}; copy the file there")
            held = {file: frozenset(self._open(file).keys()) for file in sorted(set(weight_map.values()))}
            for name, file in weight_map.items():
                if name not in held[file]:
                    raise ConfigError(f"{index_path} says that {file} holds {name}, but it does not")
            # Ordered by file, so that reading the headers opens each file once.
            return dict(sorted(weight_map.items(), key=lambda entry: entry[1]))
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            hint = " (it has pytorch_model*.bin; save it as safetensors)" if any(self.folder.glob("*.bin")) else ""
            raise ConfigError(f"{self.folder} has no *.safetensors{hint}")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 — a safe_open handle is no mapping

    def _open(self, file: str) -> Any:
        if file in self._files:
            self._files.move_to_end(file)
        else:
            path = self.folder / file
            try:
                self._files[file] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                size = path.stat().st_size if path.exists() else 0
                raise ConfigError(
                    f"{path} ({size} bytes) is truncated or not safetensors ({error}); copy the file again"
                ) from None
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        return self._files[file]

    def names(self) -> list[str]:
        """All tensor names, in the files' order."""
        return list(self._info)

    def __contains__(self, name: str) -> bool:
        return name in self._info

    def info(self, name: str) -> TensorInfo:
        return self._info[name]

    def main_dtype(self) -> torch.dtype:
        """The dtype that most elements have; bfloat16 for those in 8 bits, which were made from that."""
        elements: Counter[torch.dtype] = Counter()
        for name, info in self._info.items():
            elements[torch.bfloat16 if name in self._scale_of else info.dtype] += info.num_elements
        return elements.most_common(1)[0][0]

    def file_of(self, name: str) -> Path:
        return self.folder / self._file_of[name]

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or a box of it: a view of the mapped file, so copy it before it is changed."""
        part = self._stored(name, box)
        scale = self._scale_of.get(name)
        return part if scale is None else dequantize(part, self._stored(scale), box, self._block)

    def _stored(self, name: str, box: Box | None = None) -> torch.Tensor:
        # Indexing the view reads only the box's pages. The library's own `get_slice` copies, at a fifth of the speed.
        whole = self._open(self._file_of[name]).get_tensor(name)
        return whole if not box else whole[box_index(box)]

    def close(self) -> None:
        """Unmaps the files."""
        self._files.clear()


def _tensor_info(file: Any, name: str, path: Path) -> TensorInfo:
    part = file.get_slice(name)
    dtype = _DTYPES.get(part.get_dtype())
    if dtype is None:
        raise ConfigError(f"{path}: tensor {name} has dtype {part.get_dtype()}, which is not supported")
    return TensorInfo(tuple(part.get_shape()), dtype)
