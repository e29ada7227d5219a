"""Numbers that take a model to compute and stay the same: computed once, and kept in the run's folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_TENSOR, _CHECKSUM = "numbers", "checksum"


def kept_or_computed(
    file: Path, checksum: Callable[[], str], compute: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, str | None]:
    """The numbers of `file`, if they are those that the checksum is of; if not, computes and keeps them.

    Collective over the world; the file is rank 0's to read and write.

    Args:
        checksum: of everything that the numbers follow from; called on rank 0 alone.
        compute: gives the numbers, the same on every rank. Collective over the world.

    Returns:
        The numbers on the CPU, on every rank; and, where there was a file that could not be used, a sentence about it.
    """
    is_first = dist.get_rank() == 0
    wanted = checksum() if is_first else ""
    found: list[tuple[torch.Tensor | None, str | None]] = [_read(file, wanted) if is_first else (None, None)]
    dist.broadcast_object_list(found)
    kept, problem = found[0]
    if kept is not None:
        return kept, None
    numbers = compute()
    if is_first:
        _write(file, numbers, wanted)
    return numbers, problem and f"{file} {problem}, so its numbers were computed again"


def model_checksum(folder: str | Path, *, times: bool = True) -> str:
    """Of a Hugging Face model's config and weights, the latter by their files' names, sizes and times of change.

    Reading the weights would take minutes where they are many.

    Args:
        times: without them, a copy of a model is the same model, and so is one that learned more.
    """
    digest = hashlib.sha256(Path(folder, "config.json").read_bytes())
    for file in sorted(Path(folder).glob("*.safetensors")):
        state = file.stat()
        digest.update(f"{file.name} {state.st_size} {state.st_mtime_ns if times else ''}\n".encode())
    return digest.hexdigest()


def _read(file: Path, checksum: str) -> tuple[torch.Tensor | None, str | None]:
    """The numbers, or why the file cannot be used; neither where there is none."""
    try:
        with safe_open(str(file), framework="pt") as content:
            if (content.metadata() or {}).get(_CHECKSUM) != checksum:
                return None, "is of another model or other data"
            return content.get_tensor(_TENSOR), None
    except FileNotFoundError:
        return None, None
    except (SafetensorError, OSError) as error:
        return None, f"cannot be read ({error})"


def _write(file: Path, numbers: torch.Tensor, checksum: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.new")
    save_file({_TENSOR: numbers.contiguous()}, str(temporary), {_CHECKSUM: checksum})
    os.replace(temporary, file)
