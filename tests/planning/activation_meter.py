"""Measures what autograd keeps, by storage, while passes run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ActivationMeter:
    """Bytes of the storages that autograd holds for backward passes; weights are not counted."""

    def __init__(self, weights: Iterator[torch.nn.Parameter]) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._users: Counter[int] = Counter()
        self.held = 0
        self.peak = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within this context saved tensors are counted, those of recomputation in a backward pass too."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed.tensor):
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        # Detached: an operation that saves its own output would otherwise keep itself alive.
        return _Saved(tensor.detach(), self)

    def add(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key in self._weights:
            return
        if not self._users[key]:
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
        self._users[key] += 1

    def remove(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key in self._weights:
            return
        self._users[key] -= 1
        if not self._users[key]:
            self.held -= storage.nbytes()


class _Saved:
    """A saved tensor that tells the meter when autograd lets go of it."""

    def __init__(self, tensor: torch.Tensor, meter: ActivationMeter) -> None:
        self.tensor = tensor
        self._meter = meter
        meter.add(tensor.untyped_storage())

    def __del__(self) -> None:
        self._meter.remove(self.tensor.untyped_storage())
