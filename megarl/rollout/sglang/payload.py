"""A bucket on its way into a scheduler process of SGLang: what is in it, and a handle of its bytes.

Of a rank that shares its device with the engine the handle is CUDA's (the scheduler maps the trainer's memory), or on a
CPU the path of memory that both map. For a server of its own it is none: the bytes come over the update group.
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.rollout.engine import WeightUpdateError
from megarl.rollout.sglang.update_group import UpdateGroup
from megarl.weights.bucket import Bucket, Entry
from megarl.weights.checksum import checksum

LOAD_FORMAT = "megarl_bucket"
"""`load_format` of SGLang's weight update with such a payload; `scheduler` gives it its meaning."""


class SharedMemory:
    """Memory of this process that others of the same user map by its path, and that ends with this process.

    It has no name in a file system, so nothing is left behind when the process is killed, and the size of /dev/shm,
    64 MB in a container by default, does not matter.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._data = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """What `mapped` opens. Changes with the size."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def fill(self, data: Tensor) -> None:
        """Copies [bytes] uint8 to the beginning, and grows for it if it must."""
        if data.numel() > self._data.numel() or self._fd is None:
            self.close()
            self._fd = os.memfd_create("megarl-bucket", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, max(data.numel(), mmap.PAGESIZE))
            self._data = torch.from_file(self.path, shared=True, size=max(data.numel(), 1), dtype=torch.uint8)
        self._data[: data.numel()].copy_(data)

    def close(self) -> None:
        """Frees the memory, as far as no other process maps it."""
        self._data = torch.empty(0, dtype=torch.uint8)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Sender:
    """Makes payloads of this rank's buckets, one at a time: the next one may reuse the memory of the one before."""

    def __init__(self, *, on_cpu: bool) -> None:
        self._shared = SharedMemory() if on_cpu else None

    def payload(self, bucket: Bucket) -> bytes:
        """What `update_weights_from_tensor` takes for one scheduler process."""
        content = contents_of(bucket)
        if self._shared is not None:
            self._shared.fill(bucket.data)
            # No tensor is in it, so the importing of SGLang, seconds and some hundred MB, is saved in each rank.
            return pickle.dumps(content | {"path": self._shared.path})
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        # Device numbers differ between processes; SGLang's reductions name devices by their UUID.
        monkey_patch_torch_reductions()
        return MultiprocessingSerializer.serialize(content | {"data": bucket.data})

    def close(self) -> None:
        """Frees what is kept for the next bucket."""
        if self._shared is not None:
            self._shared.close()


def contents_of(bucket: Bucket) -> dict[str, Any]:
    """What is in a bucket, and where; also as JSON."""
    names = [entry.name for entry in bucket.entries]
    return {
        "entries": [(e.name, str(e.dtype).removeprefix("torch."), e.shape, e.offset) for e in bucket.entries],
        "checksums": None if bucket.checksums is None else {name: bucket.checksums[name] for name in names},
        "bytes": bucket.data.numel(),
    }


def arrived(content: Mapping[str, Any], group: UpdateGroup | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a payload, each checked as it comes.

    Args:
        group: what brings the bytes, where the payload has no handle.

    Raises:
        WeightUpdateError: a tensor's checksum is not that which the sender took of it.
        RuntimeError: the bytes did not come.
    """
    data = _bytes_of(content, group)
    entries = tuple(Entry(n, getattr(torch, dtype), tuple(shape), at) for n, dtype, shape, at in content["entries"])
    expected = content["checksums"]
    for name, tensor in Bucket(entries, data, expected).tensors():
        if expected is not None and checksum(tensor) != expected[name]:
            raise WeightUpdateError(f"{name} arrived changed: its checksum is not that of the trainer's tensor")
        yield name, tensor


def _bytes_of(content: Mapping[str, Any], group: UpdateGroup | None) -> Tensor:
    if "data" in content:
        return content["data"]
    if "path" in content:
        return _mapped(content["path"], content["bytes"])
    if group is None:
        raise RuntimeError("a bucket came before the group over which its bytes come")
    return group.receive(content["bytes"])


def _mapped(path: str, size: int) -> Tensor:
    """The first bytes of a `SharedMemory`."""
    file = os.stat(path)
    return _mapping(path, file.st_ino, file.st_size)[:size]


# Kept until other memory comes: a mapping for each bucket would fault every page of it anew, half of a sync's time.
@functools.lru_cache(maxsize=1)
def _mapping(path: str, _inode: int, size: int) -> Tensor:
    # torch has no read-only tensors.
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
