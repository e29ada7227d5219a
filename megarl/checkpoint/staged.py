"""Writing the `torch_dist` format in two parts: what ranks agree on, and the bytes, which each writes by itself.

Megatron-Core's own asynchronous save hands the bytes to a process that lives on, which dies where there is no CUDA.
Here they are copied to host memory and written by a thread of this process; the format is the same.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from megarl.checkpoint.dist_format import SystemErrors
from megarl.checkpoint.file_list import FileSum
from megarl.weights.together import SharedOutcome

_BACKEND, _VERSION = "torch_dist", 1


class HostMemory:
    """Memory for the copies of one set of tensors, kept from one checkpoint to the next.

    Memory fresh from the system costs about four times as much as the copy into it. On a GPU's host it is pinned.
    """

    def __init__(self) -> None:
        self.is_new = True
        """Whether no checkpoint has used it. Not whether it is empty: some ranks have nothing to copy."""
        self._buffers: dict[Any, torch.Tensor] = {}

    def copy(self, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, complete on a CPU; on a GPU when its stream has come to it. The one before under `key` is gone."""
        tensor = tensor.detach()
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def stage(state: dict[str, Any], folder: Path, memory: HostMemory | None) -> StagedWrite:
    """`dist_checkpointing.save`, but for the tensors, which the result writes. Collective over the world.

    Args:
        state: as `dist_checkpointing.save` takes it.
        folder: exists, and is empty.
        memory: to take the tensors' values now; without it they are read when they are written.

    Raises:
        ConfigError: on every rank; rank 0 cannot write.
    """
    # What a run saves does not change, so it is checked once; with many ranks that takes a while.
    sharded, common = save_preprocess(state, validate_access_integrity=memory is None or memory.is_new)
    outcome = SharedOutcome()
    with outcome.attempt(folder):
        if dist.get_rank() == 0:
            write_object(folder / COMMON_STATE_FNAME, common)
            save_config(CheckpointingConfig(_BACKEND, _VERSION), str(folder))
    outcome.check()
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    return stage_planned(MCoreSavePlanner(flatten_state_dict=False), folder, mcore_to_pyt_state_dict(by_key), memory)


def stage_planned(
    planner: DefaultSavePlanner, folder: Path, state: dict[str, Any], memory: HostMemory | None
) -> StagedWrite:
    """What torch's own save would write by a planner, as `stage`. Collective over the world.

    Args:
        planner: of this rank.
        state: the planner's.
    """
    writer = torch_checkpoint.FileSystemWriter(folder)
    writer.fs = files = _SummedFiles()
    ranks = _DistWrapper(None, True, 0)
    metadata: Metadata | None = None

    def plan_of_rank() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), ranks.is_coordinator)
        writer.set_up_storage_writer(ranks.is_coordinator)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plans_of_all(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    plan = planner.finish_plan(ranks.reduce_scatter("plan", plan_of_rank, plans_of_all))
    data = _Data(planner)
    if memory is not None:
        data.take_copies(plan, memory)
        # A reader ahead of the writer would ask for a CUDA stream, and a new thread stands on the first device.
        writer.per_thread_copy_ahead = 0
    return StagedWrite(folder=folder, _writer=writer, _files=files, _data=data, _plan=plan, _metadata=metadata)


def write_object(file: Path, content: Any) -> None:
    """`torch.save`, whose errors are the operating system's: given a path, it hides a full disk.

    Raises:
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    file.write_bytes(buffer.getbuffer())


@dataclass(kw_only=True, slots=True)
class StagedWrite:
    """The tensors of one dist_checkpoint that this rank writes."""

    folder: Path
    _writer: torch_checkpoint.FileSystemWriter
    _files: _SummedFiles
    _data: _Data
    _plan: SavePlan
    _metadata: Metadata | None
    """On rank 0."""
    results: list[WriteResult] | None = None
    """Where each tensor lies, once it is written."""

    def write(self) -> None:
        """Writes this rank's file, synced to the disk; may run in a thread, since nothing of it is collective.

        Raises:
            OSError: it cannot be written.
        """
        self.results = self._writer.write_data(self._plan, self._data).value()

    def sums(self) -> dict[Path, FileSum]:
        """Size and checksum of this rank's file, as it was written."""
        return {self.folder / name: found for name, found in self._files.sums.items()}

    def write_metadata(self, results: list[list[WriteResult]]) -> None:
        """Writes `.metadata`, which says where in the files each tensor lies; to be called on rank 0.

        Args:
            results: of all ranks.
        """
        assert self._metadata is not None
        self._writer.finish(self._metadata, results)


class _Data:
    """What a writer asks a planner for: the values of tensors, or the copies that were taken of them, each once."""

    def __init__(self, planner: DefaultSavePlanner) -> None:
        self._planner = planner
        self._copies: dict[Any, torch.Tensor] = {}

    def take_copies(self, plan: SavePlan, memory: HostMemory) -> None:
        """Copies the values to host memory, so that the tensors may change."""
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        memory.is_new = False
        self._copies = {item.index: memory.copy(item.index, self._planner.resolve_data(item)) for item in tensors}
        if torch.cuda.is_available():
            # Copies to pinned memory are still under way; the next kernel may change what they read.
            torch.cuda.current_stream().synchronize()

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Named as torch's writer calls it."""
        copy = self._copies.pop(write_item.index, None)
        return self._planner.resolve_data(write_item) if copy is None else copy


class _SummedFiles(SystemErrors):
    """Sums up files while they are written, so that no byte is read again."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}
        """Of each file, by name."""

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            summed = _SummedStream(stream)
            yield summed
        # torch writes the metadata under another name first.
        if Path(path).suffix == ".distcp":
            self.sums[Path(path).name] = FileSum(bytes=summed.size, crc32=summed.crc32)


class _SummedStream(io.IOBase):
    """A file that only grows, with its size and CRC-32."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream: Any = stream
        self.size = self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += memoryview(data).nbytes
        return int(self._stream.write(data))

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        self._stream.flush()  # what is in the buffer would escape the sync that this is asked for
        return int(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()
        super().close()
