"""What a rank says and writes when its memory runs out."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from megarl import platform
from megarl.config import RunConfig
from megarl.observe.failure import place_of
from megarl.observe.live_tensors import largest_tensors
from megarl.observe.memory_advice import changes_for
from megarl.platform.usage import allocated_bytes, describe_memory, write_memory_snapshot

FOLDER = "out-of-memory"

_TENSORS_IN_REPORT, _TENSORS_IN_SENTENCE, _CHANGES_IN_SENTENCE = 20, 2, 3

_CPU_SIGNS = ("can't allocate memory", "not enough memory")
"""In the RuntimeError of torch's CPU allocator (c10/core/impl/alloc_cpu.cpp)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, of the GPU or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CPU_SIGNS)


def report_out_of_memory(error: BaseException, config: RunConfig, rank: int) -> str:
    """Writes `out-of-memory/rank-00003.txt` in the run's folder, on a GPU with a snapshot beside it.

    To be called while the exception is handled: its frames keep alive what the failing code held.

    Returns:
        One sentence: the phase, the largest tensors, what to change, and where the report is.
    """
    place = place_of(error)
    tensors, seen_bytes = largest_tensors(platform.current().kind, error, _TENSORS_IN_REPORT)
    changes = changes_for(config, place.phases)
    largest = "; ".join(tensor.describe() for tensor in tensors[:_TENSORS_IN_SENTENCE]) or "none that Python holds"
    advice = ", or ".join(change.describe(config) for change in changes[:_CHANGES_IN_SENTENCE])
    text = "\n".join(
        [
            f"rank {rank} ran out of memory{place.describe()}",
            f"phases: {' / '.join(place.phases) or 'none; models are loaded before the first'}",
            f"memory: {describe_memory()}",
            "",
            "largest tensors:",
            *(f"  {tensor.describe()}" for tensor in tensors),
            _unseen(seen_bytes),
            "",
            "what helps, the most likely first:",
            *(f"  {change.describe(config)}: {change.why}" for change in changes),
            "",
            *traceback.format_exception(error),
        ]
    )
    return f"out of memory{place.describe()}; largest tensors are {largest}: {advice}; {_write(config, rank, text)}."


def _unseen(seen_bytes: int) -> str:
    allocated = allocated_bytes()
    if allocated is None:
        return ""
    unseen = max(allocated - seen_bytes, 0) / 2**30
    return f"  {unseen:.2f} GiB that Python does not hold: mostly what autograd keeps for the backward pass"


def _write(config: RunConfig, rank: int, text: str) -> str:
    """Writes the report; returns what there is to say of it. A full disk must not hide the first error."""
    file = Path(config.trainer.default_local_dir, FOLDER, f"rank-{rank:05d}.txt")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        has_snapshot = write_memory_snapshot(file.with_suffix(".pickle"))
    except OSError as error:
        return f"the report could not be written ({error})"
    return f"the report is {file}" + (", with a snapshot for pytorch.org/memory_viz beside it" if has_snapshot else "")
