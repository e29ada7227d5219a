"""Hugging Face folders of safetensors: reading boxes of tensors, and writing tensors one after another.

Reading goes through the safetensors library, which maps files into memory, so only the asked-for box is copied. Writing
is our own, since the library wants all tensors of a file in memory at once; the format is eight bytes of little-endian
header length, a JSON header, then the tensors' bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
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
MAX_FILE_BYTES = 5 * 10**9
"""transformers' own limit for one file."""

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()} | {"F8_E4M3": FP8}  # read, never written


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
        self._files: dict[str, Any] = {}
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
            for name, file in weight_map.items():
                if name not in self._open(file).keys():  # noqa: SIM118 — a safe_open handle is no mapping
                    raise ConfigError(f"{index_path} says that {file} holds {name}, but it does not")
            return dict(weight_map)
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            hint = " (it has pytorch_model*.bin; save it as safetensors)" if any(self.folder.glob("*.bin")) else ""
            raise ConfigError(f"{self.folder} has no *.safetensors{hint}")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            try:
                self._files[file] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                size = path.stat().st_size if path.exists() else 0
                raise ConfigError(
                    f"{path} ({size} bytes) is truncated or not safetensors ({error}); copy the file again"
                ) from None
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


class SafetensorsWriter:
    """Writes tensors of known names and sizes one after another, holding none of them."""

    def __init__(self, folder: str | Path, tensors: Mapping[str, TensorInfo], max_file_bytes: int = MAX_FILE_BYTES):
        """Plans the files.

        Args:
            folder: an existing folder. The caller makes it appear under its final name when all is written.
            tensors: what will be written, in that order.
        """
        self.folder = Path(folder)
        self._tensors = dict(tensors)
        self._files = _plan_files(self._tensors, max_file_bytes)
        self._pending = list(self._tensors)
        self._out: Any = None

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Appends the next tensor.

        Raises:
            ValueError: not the next one of the plan, or of another shape or dtype.
        """
        if not self._pending or name != self._pending[0]:
            raise ValueError(f"{name} was written out of turn; next is {self._pending[:1]}")
        expected = self._tensors[name]
        if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, planned as {expected}")
        file = self._file_starting_with(name)
        if file is not None:
            self._close_file()
            self._out = (self.folder / file).open("wb")
            self._out.write(_header({n: self._tensors[n] for n in self._files[file]}))
        # Bytes are taken through a view of the storage: `numpy` knows no bfloat16.
        self._out.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        self._pending.pop(0)

    def _file_starting_with(self, name: str) -> str | None:
        return next((file for file, names in self._files.items() if names[0] == name), None)

    def _close_file(self) -> None:
        if self._out is not None:
            self._out.close()

    def finish(self) -> None:
        """Closes the last file and writes the index, if there are several.

        Raises:
            ValueError: tensors of the plan were not written.
        """
        self._close_file()
        if self._pending:
            raise ValueError(f"{len(self._pending)} tensors were not written, the first is {self._pending[0]}")
        if len(self._files) == 1:
            return
        total = sum(info.num_bytes for info in self._tensors.values())
        weight_map = {name: file for file, names in self._files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _plan_files(tensors: Mapping[str, TensorInfo], max_file_bytes: int) -> dict[str, list[str]]:
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


def _header(tensors: Mapping[str, TensorInfo]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in tensors.items():
        entries[name] = {
            "dtype": _DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.num_bytes],
        }
        offset += info.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight bytes, as the library writes them
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    folder: str | Path, tensors: Mapping[str, TensorInfo], stream: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Writes a whole stream of tensors."""
    writer = SafetensorsWriter(folder, tensors)
    for name, tensor in stream:
        writer.write(name, tensor)
    writer.finish()
