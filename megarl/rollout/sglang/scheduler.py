"""What runs in SGLang's scheduler processes before SGLang does: four changes to SGLang 0.5.23, with their reasons."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from megarl.rollout.engine import WeightUpdateError
from megarl.rollout.sglang.payload import LOAD_FORMAT, arrived
from megarl.rollout.sglang.update_group import GROUP_NAME, UpdateGroup, join


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    """SGLang's function of this name, after the changes; `Engine.run_scheduler_process_func`."""
    # SGLang's debug dumper imports Megatron-Core where it finds it: seconds and some hundred MB for nothing.
    sys.modules["megatron"] = None  # type: ignore[assignment]
    _take_checked_buckets()
    _join_update_groups_in_time()
    _end_by_the_requests_tokens_alone()
    if not torch.cuda.is_available():
        _allocate_on_cpu()
    from sglang.srt.managers.scheduler import run_scheduler_process as run

    return run(*args, **kwargs)


def _take_checked_buckets() -> None:
    """`update_weights_from_tensor` learns a load format with checksums, which fails on all ranks or on none.

    SGLang's own formats let an error end the process, and answer with the first rank's outcome alone
    (scheduler_components/weight_updater.py: `update_weights_from_tensor`).
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    original = WeightUpdater.update_weights_from_tensor

    def update_weights_from_tensor(self: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        if load_format != LOAD_FORMAT:
            return original(self, named_tensors, load_format)
        group = self._model_update_group.get(GROUP_NAME)
        return _on_all_ranks(_load(lambda tensors: original(self, tensors), named_tensors, group))

    WeightUpdater.update_weights_from_tensor = update_weights_from_tensor


def _load(load: Any, content: Any, group: UpdateGroup | None) -> str | None:
    """Loads a bucket; what went wrong, if anything did."""
    try:
        # A list: nothing is loaded of a bucket that has a wrong tensor.
        tensors = list(arrived(content, group))
        success, message = load(tensors) if tensors else (True, "")
    except WeightUpdateError as error:
        return str(error)
    except Exception as error:  # the group's, or whatever SGLang's models raise for a tensor that does not fit
        return f"SGLang could not load a bucket from {content['entries'][0][0]} on: {type(error).__name__}: {error}"
    return None if success else message


def _join_update_groups_in_time() -> None:
    """`init_weights_update_group` and `destroy_weights_update_group` with our group, and an outcome of all ranks.

    SGLang's own waits half an hour for a trainer that is gone, and answers with the first rank's outcome alone
    (model_runner_components/weight_updater.py: `init_weights_update_group`).
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    def init_weights_update_group(
        self: Any,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        problem = None
        try:
            self._model_update_group[group_name] = join(
                master_address, master_port, rank_offset + self.tp_rank, world_size, backend
            )
        except RuntimeError as error:
            problem = f"the group for weights did not form: {error}"
        return _on_all_ranks(problem)

    def destroy_weights_update_group(self: Any, group_name: str) -> tuple[bool, str]:
        group = self._model_update_group.pop(group_name, None)
        if group is not None:
            group.abort()
        return True, ""

    WeightUpdater.init_weights_update_group = init_weights_update_group
    WeightUpdater.destroy_weights_update_group = destroy_weights_update_group


def _on_all_ranks(problem: str | None) -> tuple[bool, str]:
    """One outcome for all tensor-parallel ranks of the engine. Collective over them."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.tp_group.cpu_group
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    found = [f"{text} (tensor-parallel rank {rank} of the engine)" for rank, text in enumerate(problems) if text]
    return (not found, found[0] if found else "")


def _end_by_the_requests_tokens_alone() -> None:
    """Responses end by the request's stop tokens, not by those of the model's files as well (model_config.py:2190)."""
    from sglang.srt.configs.model_config import ModelConfig

    ModelConfig._get_hf_eos_token_id = lambda self: set()


def _allocate_on_cpu() -> None:
    """Routed experts are kept in memory that SGLang can allocate beside a GPU alone (state_capturer/base.py:67)."""
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: Any, dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
