"""The largest tensors that Python knows of, with the names that a person would look for."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveTensor:
    """Memory that one or several tensors share."""

    bytes: int
    shape: tuple[int, ...]
    """Of the largest of the tensors."""
    dtype: str
    name: str
    """Where it is held; of one of the tensors."""

    def describe(self) -> str:
        """E.g. `logits [1, 8192, 151936] float32, 4.64 GiB (…)`."""
        size = f"{self.bytes / 2**30:.2f} GiB" if self.bytes >= 2**30 else f"{self.bytes / 2**20:.2f} MiB"
        return f"{self.name}: {list(self.shape)} {self.dtype}, {size}"


def largest_tensors(device_type: str, error: BaseException, count: int) -> tuple[list[LiveTensor], int]:
    """The tensors that hold most memory, the largest first, and the bytes of all.

    What autograd keeps for the backward pass is held by C++ and not among them.

    Args:
        device_type: `cpu` or `cuda`.
        error: the exception whose frames are searched for names; they also keep alive what the failing code held.
    """
    by_memory: dict[tuple[str, int], list[Tensor]] = {}
    for tensor in _tensors():
        if (place := _memory_of(tensor, device_type)) is not None:
            by_memory.setdefault(place, []).append(tensor)
    sizes = {place: tensors[0].untyped_storage().nbytes() for place, tensors in by_memory.items()}
    largest = sorted(sizes, key=lambda place: -sizes[place])[:count]
    names = {**dict(_local_names(error)), **dict(_module_names())}
    found = [_live_tensor(by_memory[place], sizes[place], names) for place in largest]
    return found, sum(sizes.values())


def _tensors() -> list[Tensor]:
    # `type`, not `isinstance`: that would ask every lazy object of every library for its class.
    found: list[Tensor] = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    # Gradients that backward made have no Python object until somebody asks.
    gradients = [tensor.grad for tensor in found if tensor.is_leaf and tensor.requires_grad]
    return [*found, *(gradient for gradient in gradients if gradient is not None)]


def _memory_of(tensor: Tensor, device_type: str) -> tuple[str, int] | None:
    """Where its memory begins; None where it has none on such a device."""
    try:
        if tensor.device.type != device_type or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        return (str(tensor.device), storage.data_ptr()) if storage.nbytes() else None
    except (RuntimeError, NotImplementedError):  # fake, functional and other tensors without memory of their own
        return None


def _live_tensor(tensors: list[Tensor], size: int, names: dict[int, str]) -> LiveTensor:
    largest = max(tensors, key=Tensor.numel)
    named = [names[id(tensor)] for tensor in tensors if id(tensor) in names]
    name = named[0] if named else _referrer_name(largest) or "a tensor"
    if len(named) > 1:
        name += f" and {len(named) - 1} more in the same memory"
    return LiveTensor(
        bytes=size, shape=tuple(largest.shape), dtype=str(largest.dtype).removeprefix("torch."), name=name
    )


def _module_names() -> Iterator[tuple[int, str]]:
    """Parameters, their gradients and buffers of all models, by `id`."""
    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    for root in modules:
        if id(root) in inner:
            continue
        model = type(root).__name__
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            yield id(tensor), f"{model} {name}"
            # `main_grad` is Megatron-Core's, a view of its gradient buffer.
            for attribute in ("grad", "main_grad"):
                if isinstance(gradient := getattr(tensor, attribute, None), Tensor):
                    yield id(gradient), f"{model} {name}.{attribute}"


def _local_names(error: BaseException) -> Iterator[tuple[int, str]]:
    """Tensors in local variables of the failing functions, and in lists, tuples and dicts there, by `id`."""
    trace = error.__traceback__
    while trace is not None:  # the innermost comes last, and its names win
        code = trace.tb_frame.f_code
        where = f"in {code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})"
        for name, value in trace.tb_frame.f_locals.items():
            for label, tensor in _tensors_in(name, value):
                yield id(tensor), f"{label} {where}"
        trace = trace.tb_next


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, Tensor):
        yield name, value
        return
    if isinstance(value, list | tuple):
        items = iter(enumerate(value))
    elif isinstance(value, dict):
        items = iter(list(value.items()))
    else:
        return
    for key, item in items:
        if isinstance(item, Tensor):
            yield f"{name}[{key!r}]", item


def _referrer_name(tensor: Tensor) -> str | None:
    """The attribute or the item that holds the tensor."""
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, dict):
            key = next((key for key, value in holder.items() if value is tensor), None)
            owner = next((item for item in gc.get_referrers(holder) if _attributes(item) is holder), None)
            if key is not None:
                return f"{key!r} in a dict" if owner is None else f"{type(owner).__name__}.{key}"
        elif not isinstance(holder, list | tuple | types.FrameType | types.CellType):
            # Python 3.11 and later keep attributes in the object until somebody asks for its dict.
            for key, value in (_attributes(holder) or {}).items():
                if value is tensor:
                    return f"{type(holder).__name__}.{key}"
    return None


def _attributes(item: object) -> dict[str, Any] | None:
    try:
        return object.__getattribute__(item, "__dict__")
    except AttributeError:
        return None
