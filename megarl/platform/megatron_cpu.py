"""Stand-ins with which Megatron-Core 0.16.1 runs on a CPU, each with the line that needs it.

Paths are relative to `megatron/core/`. Two kinds of reason: *cuda* — the line calls CUDA and raises without it;
*gloo* — gloo lacks the collective. What the absence of Transformer Engine needs is in `megatron_without_te.py`.
Nothing here changes what is computed; `tests/models/test_parity.py` and the layout proof hold that to account.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


@functools.cache
def install() -> None:
    """Installs every stand-in. Call it before a Megatron-Core model is built; further calls do nothing."""
    _patch_cuda_surface()
    _patch_device_literals()
    _patch_tensor_type()
    _patch_random_tracker()
    _patch_token_dispatcher()
    _patch_uneven_collectives()


class _NullStream:
    """A CUDA stream or event of a device that has one queue: every method succeeds and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def record_event(self, *args: Any) -> _NullStream:
        return _NullStream()

    def query(self) -> bool:
        return True


def _patch_cuda_surface() -> None:
    cuda = torch.cuda
    # cuda: distributed/param_and_grad_buffer.py:800, pipeline_parallel/p2p_communication.py:190,
    # tensor_parallel/{layers.py:552,mappings.py:91}, models/common/embeddings/rotary_pos_embedding.py:78,
    # transformer/moe/router.py:90, dist_checkpointing/strategies/state_dict_saver.py:252. All use the result as
    # `device=`, so a torch.device serves.
    cuda.current_device = lambda: CPU
    # cuda: p2p_communication.py:242, dist_checkpointing/strategies/filesystem_async.py:230
    cuda.synchronize = lambda *args, **kwargs: None
    # cuda: transformer/moe/token_dispatcher.py:445,871; moe/shared_experts.py:123; param_and_grad_buffer.py:422
    cuda.Stream = cuda.Event = _NullStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NullStream()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    # cuda: utils.py:2186
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None


def _patch_device_literals() -> None:
    """`device="cuda"`, `pin_memory=True` and `.cuda()` written out in Megatron-Core mean the one device there is."""
    # torch fills a cache with its constructors on first use of `with torch.device(...)`. Filled after they are
    # wrapped, it would miss them and `torch.device("meta")` would silently allocate for real.
    from torch.utils._device import _device_constructors

    _device_constructors()

    def is_cuda(device: object) -> bool:
        return str(device).startswith("cuda") if isinstance(device, str | torch.device) else False

    def wrap(name: str) -> None:
        original = getattr(torch, name)

        @functools.wraps(original)
        def constructor(*args: Any, **kwargs: Any) -> torch.Tensor:
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return original(*args, **kwargs)

        setattr(torch, name, constructor)

    # cuda: pipeline_parallel/schedules.py:596, optimizer/{optimizer.py:473,clip_grads.py:90}, utils.py:1207,
    # transformer/utils.py:35, moe/moe_utils.py:998; pin_memory: embeddings/rope_utils.py:62
    for name in ("zeros", "ones", "empty", "tensor"):
        wrap(name)
    # cuda: embeddings/rope_utils.py:64 (context parallel), optimizer/distrib_optimizer.py:1089, mbridge core/util.py
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]


class _DeviceFreeTypeName(str):
    """A tensor type name that equals its CUDA namesake: 'torch.FloatTensor' == 'torch.cuda.FloatTensor'."""

    def __eq__(self, other: object) -> bool:
        plain = lambda text: str(text).replace("torch.cuda.", "torch.")
        return isinstance(other, str) and plain(self) == plain(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _patch_tensor_type() -> None:
    # cuda: optimizer/optimizer.py:671-699, distrib_optimizer.py:361, clip_grads.py:167 compare `tensor.type()` strings
    original = torch.Tensor.type

    def type_or_cast(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return _DeviceFreeTypeName(original(self))

    torch.Tensor.type = type_or_cast  # type: ignore[method-assign,assignment]


def _patch_random_tracker() -> None:
    """The generator that Megatron-Core forks and restores is the CPU's default generator."""
    import megatron.core.tensor_parallel.random as mrandom

    cuda = torch.cuda

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    cuda.manual_seed = manual_seed  # cuda: random.py:237
    get_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.get_rng_state = cuda.random.get_rng_state = get_state  # cuda: random.py:55,235
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # random.py:74 would queue the restoration until CUDA starts, which is never
    mrandom._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    class _DropForkWarning(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            # random.py:266 warns at each fork that the CPU state moved: here it is the tracked state.
            return "CPU RNG state changed" not in record.getMessage()

    logging.getLogger(mrandom.__name__).addFilter(_DropForkWarning())


def _patch_token_dispatcher() -> None:
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # moe_utils.py:1093 converts CUDA tensors only; others reach all_to_all_single as tensors instead of lists
    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _patch_uneven_collectives() -> None:
    """gloo: mappings.py:150,198 gather and reduce-scatter pieces of different sizes (MoE token dispatch)."""
    import megatron.core.tensor_parallel.mappings as mappings

    even_gather, even_reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(x: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: x.size(0)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter(
        x: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(x, group, input_split_sizes, use_global_buffer)
        total = x.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return torch.split(total, [int(size) for size in input_split_sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter
