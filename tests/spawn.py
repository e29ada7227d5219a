"""Runs a function on several gloo ranks, each its own process, and brings back what every rank returned."""

from __future__ import annotations

import datetime
import faulthandler
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.launch import PATIENCE

_GRACE_S = 10.0
"""How long the parent waits beyond the ranks' own timeout: a rank's clock starts after its imports."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls `fn(*args)` on `world_size` ranks whose default process group is gloo, and returns results by rank.

    `fn` and `args` must be picklable: `fn` is a top-level function of an importable module. Results travel through
    `torch.save`, so they may hold tensors.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the first rank that failed, also when it
            waited `timeout` · `PATIENCE` seconds in a collective; the others are terminated.
        TimeoutError: ranks still ran after that time; each has printed its Python stack on stderr.
    """
    timeout *= PATIENCE
    with tempfile.TemporaryDirectory(prefix="megarl-ranks-") as folder:
        deadline = time.monotonic() + timeout + _GRACE_S
        ranks = mp.start_processes(
            _rank_main, (fn, world_size, folder, timeout, args), nprocs=world_size, join=False, start_method="spawn"
        )
        try:
            while not ranks.join(timeout=max(deadline - time.monotonic(), 0.0)):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{fn.__name__} on {world_size} ranks did not end within {timeout:.0f} s")
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(_result_path(folder, rank), weights_only=False) for rank in range(world_size)]


def _rank_main(
    rank: int, fn: Callable[..., Any], world_size: int, folder: str, timeout: float, args: tuple[Any, ...]
) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=timeout)
    )
    try:
        torch.save(fn(*args), _result_path(folder, rank))
    finally:
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def _result_path(folder: str, rank: int) -> Path:
    return Path(folder, f"result-{rank}.pt")
