"""Marks the collectives of a process in its `Progress`, whoever calls them: megarl, Megatron-Core or torch itself."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megarl.platform.progress import PROGRESS

_NAMES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "_all_gather_base",
    "_reduce_scatter_base",
)
_MARKED = "megarl_marked"


def mark_collectives() -> None:
    """From now on the functions of torch.distributed, and waiting for their handles, are marked in `PROGRESS`.

    A second call does nothing.
    """
    if hasattr(dist.all_reduce, _MARKED):
        return
    marked = {function: _marked(function) for function in (getattr(c10d, name) for name in _NAMES)}
    # torch's functions call one another, and compare themselves, by their names in c10d; Megatron-Core's modules keep
    # names of their own for some (`dist_all_gather_func`), from when they were imported.
    megatron = [module for name, module in sys.modules.items() if name.startswith("megatron.")]
    for module in (c10d, dist, *megatron):
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in marked:
                setattr(module, name, marked[value])
    dist.Work.wait = _marked_wait(dist.Work.wait)


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__.lstrip("_")
    position = _position_of_group(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        group = named.get("group")
        if group is None and position is not None and position < len(arguments):
            group = arguments[position]
        is_outermost = PROGRESS.begin_collective(name, group)
        try:
            return function(*arguments, **named)
        finally:
            if is_outermost:
                PROGRESS.end_collective()

    setattr(call, _MARKED, True)
    return call


def _position_of_group(function: Callable[..., Any]) -> int | None:
    names = list(inspect.signature(function).parameters)
    return names.index("group") if "group" in names else None


def _marked_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Of the handle that an asynchronous collective gives."""

    @functools.wraps(wait)
    def call(work: Any, *arguments: Any, **named: Any) -> Any:
        # A handle does not know what it is of. The latest call is a good guess: handles are waited for soon.
        latest = PROGRESS.collective
        is_outermost = latest is not None and PROGRESS.begin_collective(latest.name, latest.group)
        try:
            return wait(work, *arguments, **named)
        finally:
            if is_outermost:
                PROGRESS.end_collective()

    return call
