"""A bucket: whole tensors side by side in one flat piece of memory, as they travel to an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from megarl.weights.bucket_memory import BucketMemory

ALIGNMENT = 16
"""Bytes. Torch views memory as another dtype only from a multiple of its size; 16 is also what vector loads want."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies in a bucket."""

    name: str
    """In the Hugging Face checkpoint; experts one by one."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket; a multiple of `ALIGNMENT`."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Whole tensors in one flat piece of memory. The memory belongs to the sender, who fills it again afterwards."""

    entries: tuple[Entry, ...]
    data: torch.Tensor
    """[bytes] uint8, on the trainer's device."""
    checksums: Mapping[str, int] | None
    """`megarl.weights.checksum` of each tensor as the trainer's parameters hold it; None: not to be compared."""
    memory: BucketMemory | None = None
    """What `data` is the beginning of, on the sender's side."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by name, as views of `data`."""
        for entry in self.entries:
            flat = self.data[entry.offset : entry.offset + entry.num_bytes]
            yield entry.name, flat.view(entry.dtype).view(entry.shape)


def aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]], checksums: Mapping[str, int] | None = None, *, mapped: bool = False
) -> Bucket:
    """A bucket of its own memory with copies of `tensors`.

    Args:
        mapped: whether other processes will map it (`BucketMemory`).
    """
    held = list(tensors)
    entries, offset = [], 0
    for name, tensor in held:
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), offset))
        offset += aligned(tensor.nbytes)
    memory = BucketMemory(offset, mapped=mapped)
    bucket = Bucket(tuple(entries), memory.data, checksums, memory)
    for (_, view), (_, tensor) in zip(bucket.tensors(), held, strict=True):
        view.copy_(tensor)
    return bucket
