"""A bucket on its way into a scheduler process of SGLang: what is in it, and a handle of its bytes.

Of a rank that shares its device with the engine the handle is CUDA's (the scheduler maps the trainer's memory), or on a
CPU the path of memory that both map. For a server of its own it is none: the bytes come over the update group.
"""

from __future__ import annotations

import functools
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


def payload_of(bucket: Bucket) -> bytes:
    """What `update_weights_from_tensor` takes for one scheduler process; good as long as the bucket is."""
    assert bucket.memory is not None and (bucket.data.is_cuda or bucket.memory.path is not None), "it cannot be mapped"
    content = contents_of(bucket)
    if bucket.memory.path is not None:
        # No tensor is in it, so the importing of SGLang, seconds and some hundred MB, is saved in each rank.
        return pickle.dumps(content | {"path": bucket.memory.path})
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    # Device numbers differ between processes; SGLang's reductions name devices by their UUID.
    monkey_patch_torch_reductions()
    return MultiprocessingSerializer.serialize(content | {"data": bucket.data})


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
    """The first bytes that are at a `BucketMemory.path`."""
    file = os.stat(path)
    return _mapping(path, file.st_ino, file.st_size)[:size]


# Kept until other memory comes: a mapping for each bucket would fault every page of it anew, half of a sync's time.
@functools.lru_cache(maxsize=1)
def _mapping(path: str, _inode: int, size: int) -> Tensor:
    # torch has no read-only tensors.
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
