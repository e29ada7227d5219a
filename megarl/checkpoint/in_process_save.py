"""Writes a model's weights in Megatron-Core's dist_checkpoint format (`torch_dist`) without extra processes.

Megatron-Core's own save strategy starts a manager process, which imports the entry script again, and forks writers off
a process that has gloo and OpenMP threads, where it has hung. The same format comes from torch's own writer in this
process: the strategy below translates with Megatron-Core's functions and leaves the files to torch.

Each rank writes files of bounded size one after another, so that a killed conversion can go on after the last of them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megarl.checkpoint.dist_format import SystemErrors, sharded_tensors
from megarl.config.errors import ConfigError
from megarl.models.build import MegatronModel
from megarl.weights.files import sync
from megarl.weights.journal import Journal
from megarl.weights.safetensors_write import MAX_FILE_BYTES
from megarl.weights.together import found_by


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How weights are written, where that is not as usual."""

    max_file_bytes: int = MAX_FILE_BYTES
    """Of tensors in one file; a larger tensor has one of its own."""
    journal: Journal | None = None
    """Of a folder above; files that it knows to be finished are not written again. The layout has to be the same."""
    fill: Callable[[torch.Tensor], None] | None = None
    """Is given each tensor before it is written, to fill it; those of finished files are not asked for."""
    progress: Callable[[int], None] | None = None
    """Is told the bytes that this rank wrote, or need not write, since the last call."""


def write_tensors(model: MegatronModel, folder: Path, options: WriteOptions | None = None) -> int:
    """Writes all parameters into `folder`, an existing folder. Collective over the world.

    Returns:
        The bytes that this rank wrote.

    Raises:
        ConfigError: on every rank; a rank cannot write, or `options.fill` found something wrong.
    """
    strategy = InProcessSave(options or WriteOptions())
    try:
        with _no_warning_of_finished_files():
            dist_checkpointing.save(sharded_tensors(model), str(folder), sharded_strategy=strategy)
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        if isinstance(failure, ConfigError):
            raise ConfigError(str(failure) + found_by(rank)) from None
        if not isinstance(failure, OSError):
            raise
        raise ConfigError(f"cannot write {folder}: {failure.strerror}{found_by(rank)}") from None
    return strategy.num_bytes


@contextlib.contextmanager
def _no_warning_of_finished_files() -> Iterator[None]:
    """Megatron-Core warns of a folder that is not empty, which here is one to go on with."""
    logger = logging.getLogger(dist_checkpointing.serialization.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class InProcessSave(SaveShardedStrategy):
    """Writes with torch's `FileSystemWriter`, each rank its own files, synced to the disk."""

    def __init__(self, options: WriteOptions) -> None:
        super().__init__("torch_dist", 1)
        self._options = options
        self.num_bytes = 0
        """What this rank has written."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        writer = _Writer(Path(checkpoint_dir), self._options)
        planner = _SavePlanner(self._options)
        torch_checkpoint.save(mcore_to_pyt_state_dict(by_key), storage_writer=writer, planner=planner)
        self.num_bytes = writer.num_bytes


class _Writer(torch_checkpoint.FileSystemWriter):
    """Writes `__<rank>_<number>.distcp`."""

    def __init__(self, folder: Path, options: WriteOptions) -> None:
        super().__init__(folder)
        self.fs = _WholeFiles()
        self._folder, self._options = folder, options
        self.num_bytes = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_in_files(plan.items, self._options.max_file_bytes)):
            path = self._folder / f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
            results += self._finished(path, items) or self._write(path, items, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _finished(self, path: Path, items: Sequence[WriteItem]) -> list[WriteResult] | None:
        """Where an earlier run put the tensors, if it finished the file."""
        journal = self._options.journal
        record = None if journal is None else journal.finished.get(journal.name_of(path))
        if record is None:
            return None
        if self._options.progress is not None:
            self._options.progress(sum(map(_num_bytes, items)))
        return [
            WriteResult(item.index, length, _StorageInfo(path.name, offset, length))
            for item, (offset, length) in zip(items, record["places"], strict=True)
        ]

    def _write(self, path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        files: queue.Queue = queue.Queue()
        files.put((path, path.name, items))
        results = self._write_data(planner, files).wait()
        self.num_bytes += path.stat().st_size
        if self._options.journal is not None:
            place_of = {result.index: result.storage_data for result in results}
            places = [place_of[item.index] for item in items]
            self._options.journal.record(path, places=[(place.offset, place.length) for place in places])
        return results

    def storage_meta(self) -> StorageMeta:
        """Without torch's random number and the folder's temporary name: the same weights make the same bytes."""
        return StorageMeta()


def _in_files(items: Sequence[WriteItem], max_file_bytes: int) -> Iterator[list[WriteItem]]:
    """What goes into each file, in the order given."""
    file: list[WriteItem] = []
    size = 0
    for item in items:
        if file and size + _num_bytes(item) > max_file_bytes:
            yield file
            file, size = [], 0
        file.append(item)
        size += _num_bytes(item)
    if file:
        yield file


def _num_bytes(item: WriteItem) -> int:
    """Of a tensor; 0 for other objects."""
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


class _SavePlanner(MCoreSavePlanner):
    """Fills tensors and reports progress as the writer asks for one after another."""

    def __init__(self, options: WriteOptions) -> None:
        super().__init__(flatten_state_dict=False)
        self._options = options

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            if self._options.fill is not None:
                self._options.fill(data)
            if self._options.progress is not None:
                self._options.progress(data.nbytes)
        return data


class _WholeFiles(SystemErrors):
    """Files appear under their names when they are whole and on the disk."""

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with super().create_stream(temporary, mode) as stream:
                yield stream
            sync(temporary)  # torch syncs before the last buffer is flushed
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
