"""`files.json`: every file of a run's checkpoint with its size and checksum, so that damage is noticed and named.

CRC-32 (zlib's) runs at several GB/s on one core. It guards against faults, not against an adversary.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.config.errors import ConfigError

FILE_LIST_NAME = "files.json"
FORMAT_VERSION = 1
"""Of a run's checkpoint as a whole; raised when it can no longer be resumed by the versions before."""

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSum:
    """What a file must be."""

    bytes: int
    crc32: int


def sum_of(file: Path) -> FileSum:
    """Reads a file and sums it up."""
    size = crc32 = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
    return FileSum(bytes=size, crc32=crc32)


def write_file_list(folder: Path, known: Mapping[str, FileSum]) -> None:
    """Writes `files.json` for everything in a folder.

    Args:
        known: by path within the folder; the others, which are small, are read.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = {name: dataclasses.asdict(known.get(name) or sum_of(folder / name)) for name in names}
    text = json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1) + "\n"
    (folder / FILE_LIST_NAME).write_text(text, encoding="utf-8")


def damage_of(folder: Path, *, contents: bool) -> str | None:
    """What is wrong with a checkpoint's files, the same on every rank; None: nothing. Collective over the world.

    Ranks share the files out, so that each is read once.

    Args:
        contents: compare checksums too, and not only sizes.

    Raises:
        ConfigError: on every rank; a newer megarl wrote it.
    """
    found: list[Any] = [_read_list(folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    files, problem = found[0]
    if isinstance(problem, ConfigError):
        raise problem
    if problem is not None:
        return str(problem)
    # The largest first, one after another: shares are about equal.
    order = sorted(files, key=lambda name: (-files[name].bytes, name))
    mine = order[dist.get_rank() :: dist.get_world_size()]
    problems = [problem for name in mine if (problem := _file_problem(folder, name, files[name], contents))]
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, problems)
    sentences = sorted(text for texts in everyones for text in texts)
    if not sentences:
        return None
    more = f" ({len(sentences)} files are wrong)" if len(sentences) > 1 else ""
    return f"{folder} is incomplete or damaged: {sentences[0]}{more}"


def _read_list(folder: Path) -> tuple[dict[str, FileSum], str | ConfigError | None]:
    file = folder / FILE_LIST_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content["format_version"]
        if version > FORMAT_VERSION:
            return {}, ConfigError(
                f"{file} has format_version {version}, but this megarl reads up to {FORMAT_VERSION}; update megarl."
            )
        return {name: FileSum(**values) for name, values in content["files"].items()}, None
    except FileNotFoundError:
        what = "is not a checkpoint of a run, or an incomplete one" if folder.is_dir() else "does not exist"
        return {}, f"{folder} {what}: there is no {FILE_LIST_NAME}"
    except OSError as error:
        return {}, f"{folder} is damaged: {FILE_LIST_NAME} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}, f"{folder} is incomplete or damaged: {FILE_LIST_NAME} is not what was written"


def _file_problem(folder: Path, name: str, wanted: FileSum, contents: bool) -> str | None:
    file = folder / name
    try:
        size = file.stat().st_size
        if size != wanted.bytes:
            return f"{name} has {size} bytes instead of {wanted.bytes}"
        if contents and sum_of(file) != wanted:
            return f"{name} has other bytes than were written (its checksum differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None
