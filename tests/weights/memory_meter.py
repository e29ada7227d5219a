"""Measures the memory of tensors that are made while it is on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):
    """The most bytes that storages held at once which did not exist when the meter was made.

    After each operation the storages of its results are looked at that are still alive.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._existing = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self._alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self._existing:
                self._alive[StorageWeakRef(result.untyped_storage())] = result.untyped_storage().nbytes()
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return results
