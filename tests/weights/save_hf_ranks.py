"""Writes one model as Hugging Face folders from several layouts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tests.checkpoint.ranks import fresh_model, groups_of, load_hf

from megarl.weights import exchange, save_hf  # isort: skip  # after what prepares Megatron-Core


def write_in(layouts: list[dict], hf: Path, folder: Path, max_file_bytes: int, round_bytes: int) -> list[dict]:
    """The folders `folder/<number of the layout>`; the bytes that this rank wrote, and those it was told of."""
    exchange.plan_rounds.__defaults__ = (round_bytes,)
    results = []
    for number, sizes in enumerate(layouts):
        model = fresh_model(hf, groups_of(**sizes), dtype=torch.bfloat16)
        load_hf(model, hf)
        target = folder / str(number)
        if dist.get_rank() == 0:
            target.mkdir()
        dist.barrier()
        told: list[int] = []
        written = save_hf.save_hf(model, target, source_folder=hf, max_file_bytes=max_file_bytes, progress=told.append)
        results.append({"written": written, "told": sum(told)})
    return results
