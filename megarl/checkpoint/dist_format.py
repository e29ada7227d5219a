"""Reads weights from Megatron-Core's dist_checkpoint format (`torch_dist`), and what writing shares with that."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from megarl import platform
from megarl.config.errors import ConfigError
from megarl.models.build import MegatronModel
from megarl.weights.together import found_by, raise_together

_LARGEST_LIST = 3
"""How many tensor names an error lists."""

_UNREADABLE = (OSError, EOFError, pickle.UnpicklingError, CheckpointingException)
"""What torch and Megatron-Core raise on files that are missing, truncated or of another kind."""


def read_tensors(model: MegatronModel, folder: Path) -> None:
    """Fills all parameters from `folder`, cast to their dtype. Collective over the world.

    Whatever layout wrote it: each rank reads the stored pieces that overlap its own, one at a time. Vocabulary rows
    beyond what is stored are set to zero.

    Raises:
        ConfigError: on every rank; the folder is damaged, or holds another model.
    """
    sharded = sharded_tensors(model)
    _check_same_model(list(nested_values(sharded)), folder)
    # Reads into the parameters themselves, so the returned dictionary is not needed.
    load_sharded(sharded, folder, validate_access_integrity=False)


def load_sharded(state: dict[str, Any], folder: Path, *, validate_access_integrity: bool = True) -> dict[str, Any]:
    """`dist_checkpointing.load`, to which a damaged folder is a person's problem. Collective over the world.

    Raises:
        ConfigError: on every rank; a file of the folder is missing, truncated or unreadable.
    """
    problem = None
    try:
        # Read by each rank on its own. Inside `load` their failure could not be told from one of the network.
        dist_checkpointing.load_common_state_dict(str(folder))
        dist_checkpointing.load_tensors_metadata(str(folder))
    except Exception as error:  # damaged JSON and pickles may raise anything
        problem = damaged(folder, error)
    raise_together(problem)
    try:
        return dist_checkpointing.load(state, str(folder), validate_access_integrity=validate_access_integrity)
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise ConfigError(damaged(folder, failure) + found_by(rank)) from None
    except _UNREADABLE as error:
        raise ConfigError(damaged(folder, error)) from None


def sharded_tensors(model: MegatronModel) -> dict[str, Any]:
    """This rank's parameters and what part of which stored tensor each is, as `dist_checkpointing` takes them."""
    state = {
        f"chunk{index}": chunk.sharded_state_dict(metadata={"dp_cp_group": model.groups.dp_cp})
        for index, chunk in enumerate(model.chunks)
    }
    # Gated units are stored as two tensors. Split here they are views, which loading fills in place; left to
    # `dist_checkpointing.load` they would be joined again in memory of their own, for the whole model.
    apply_factories(state)
    # What is left out is Transformer Engine's `_extra_state`, which the torch backend neither has nor needs.
    tensors, _ = extract_matching_values(state, lambda value: isinstance(value, ShardedTensor))
    return tensors


class SystemErrors(FileSystem):
    """Files of torch's writer, whose errors are the operating system's.

    torch.save turns a full disk into an error about positions in a file.
    """

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _check_same_model(wanted: list[ShardedTensor], folder: Path) -> None:
    """Compares names and shapes of what is stored with the model's. Collective over the world."""
    problem, stored = None, {}
    try:
        found = dist_checkpointing.load_tensors_metadata(str(folder))
    except Exception as error:  # damaged JSON and pickles may raise anything
        problem = damaged(folder, error)
    else:
        stored = {key: tuple(tensor.global_shape) for key, tensor in found.items()}
        problem = next(_differences(wanted, stored, folder), None)
    raise_together(problem)
    raise_together(_left_over(wanted, stored, folder))


def _differences(wanted: list[ShardedTensor], stored: dict[str, tuple[int, ...]], folder: Path) -> Iterator[str]:
    missing = sorted({tensor.key for tensor in wanted} - stored.keys())
    if missing:
        yield f"{folder} lacks {_listed(missing)}, which the model has; it is a checkpoint of another model"
    for tensor in wanted:
        shape, here = tuple(tensor.global_shape), stored.get(tensor.key)
        # The rows of a padded vocabulary may differ.
        first = 1 if tensor.allow_shape_mismatch else 0
        if here is not None and (len(here) != len(shape) or here[first:] != shape[first:]):
            yield (
                f"{folder} holds {tensor.key} of shape {list(here)}, but the model's has {list(shape)}; it is a "
                "checkpoint of another model"
            )


def _left_over(wanted: list[ShardedTensor], stored: dict[str, tuple[int, ...]], folder: Path) -> str | None:
    """What is stored and no rank asks for. Collective over the world."""
    keys = sorted(stored)
    asked = {tensor.key for tensor in wanted}
    flags = torch.tensor([key in asked for key in keys], dtype=torch.uint8, device=platform.current().device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    left = [key for key, flag in zip(keys, flags.tolist(), strict=True) if not flag]
    if not left:
        return None
    return f"{folder} holds {_listed(left)}, which the model lacks; it is a checkpoint of another model"


def damaged(folder: Path, error: BaseException) -> str:
    """A sentence about a dist_checkpoint that torch or Megatron-Core could not read."""
    # The first sentence: torch goes on with guesses, at length.
    reason = " ".join(str(error).split()).split(". ")[0][:200] or type(error).__name__
    return f"{folder} is incomplete or damaged ({reason}); copy or convert the checkpoint again, or use another one"


def _listed(names: list[str]) -> str:
    more = len(names) - _LARGEST_LIST
    return ", ".join(names[:_LARGEST_LIST]) + (f" and {more} more tensors" if more > 0 else "")
