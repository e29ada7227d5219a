"""What is complete of a folder that is being written, so that a killed program can go on where it was.

One record for each finished file, written by whoever wrote the file, after the file is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.weights.checksum import checksum
from megarl.weights.files import whole_file
from megarl.weights.together import SharedOutcome

_READ_BYTES = 2**24


class Journal:
    """The finished files of `folder`. What this run finishes is recorded, and not added to `finished`."""

    def __init__(self, folder: Path, records: Path) -> None:
        """Reads what an earlier run recorded, and checks it against the files. Collective over the world.

        Each rank checks its share of the files by size and checksum. Records of files that are not as recorded do not
        count.

        Args:
            records: a folder for the records alone.

        Raises:
            ConfigError: on every rank; a rank cannot read a file.
        """
        self.folder, self._records = folder, records
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(records.glob("*.json"))]
        outcome = SharedOutcome()
        damaged: list[str] = []
        with outcome.attempt(folder):
            mine = found[dist.get_rank() :: dist.get_world_size()]
            damaged = [record["file"] for record in mine if not self._is_as_recorded(record)]
        outcome.check()
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, damaged)
        self.damaged = sorted(file for files in gathered for file in files)
        """Files that an earlier run finished and that have changed since."""
        self.finished: Mapping[str, dict[str, Any]] = {
            record["file"]: record for record in found if record["file"] not in self.damaged
        }
        """The record of each file that an earlier run finished; the same on every rank."""

    def name_of(self, path: Path) -> str:
        """What records call a file."""
        return path.relative_to(self.folder).as_posix()

    def record(self, path: Path, **more: Any) -> None:
        """Notes that a file of the folder is finished.

        Args:
            more: what the record is to say besides, as JSON.
        """
        name = self.name_of(path)
        content = {"file": name, "size": path.stat().st_size, "checksum": file_checksum(path), **more}
        with whole_file(self._records / f"{urllib.parse.quote(name, safe='')}.json") as stream:
            stream.write(json.dumps(content).encode())

    def _is_as_recorded(self, record: Mapping[str, Any]) -> bool:
        path = self.folder / record["file"]
        if not path.is_file() or path.stat().st_size != record["size"]:
            return False
        return file_checksum(path) == record["checksum"]


def file_checksum(path: Path) -> str:
    """SHA-256 of the checksums (`weights.checksum`) of the file's parts of 16 MiB; ten times as fast as of the file."""
    buffer = torch.empty(_READ_BYTES, dtype=torch.uint8)
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer.numpy()):
            digest.update(f"{checksum(buffer[:count])} ".encode())
    return digest.hexdigest()
