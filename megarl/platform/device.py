"""The choice of device, made once."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass

# Megatron-Core's `jit_fuser` is torch.compile. On a CPU that means a C++ compiler at run time and minutes of
# compilation for a test; it is read when torch._dynamo is first imported, so it is set before torch is.
_DYNAMO_SWITCH = "TORCHDYNAMO_DISABLE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """The device of this process and what follows from it."""

    kind: str
    """`cpu` or `cuda`."""
    collective_backend: str
    """`gloo` or `nccl`, for `torch.distributed`."""
    layer_backend: str
    """What `model.backend: auto` means here: `te` where Transformer Engine and a GPU are present, else `torch`."""
    device: str
    """A torch device string: `cpu` or `cuda:<local rank>`."""

    @property
    def chunk_bytes(self) -> int:
        """How much of a large tensor to work on at a time, in bytes.

        A CPU is fastest where a chunk stays in its cache (measured: benchmarks/logprobs.py). On a GPU a kernel launch
        costs more than a pass over a few MiB, so chunks are larger there, by estimate.
        """
        return 4 * 2**20 if self.is_cpu else 256 * 2**20

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    def megatron_overrides(self) -> dict[str, object]:
        """TransformerConfig settings that this device needs, whatever the model."""
        if not self.is_cpu:
            return {"use_cpu_initialization": False}
        return {
            "use_cpu_initialization": True,
            # The fused kernels are CUDA extensions; the unfused paths are the reference for them.
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            "moe_shared_expert_overlap": False,
            "apply_rope_fusion": False,
            # gloo returns before a send has read its buffer: freeing the output early gives *silently wrong*
            # gradients with virtual pipeline stages (grad norm off by 77 %).
            "deallocate_pipeline_outputs": False,
            # gloo has no batched isend/irecv that keeps several tensors of one pair apart (same symptom).
            "batch_p2p_comm": False,
        }


@functools.cache
def current() -> Platform:
    """The platform of this process. The first call decides, and prepares Megatron-Core for a CPU."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-Core's TP overlap relies on the order
    import torch

    on_cuda = torch.cuda.is_available()
    if not on_cuda:
        os.environ.setdefault(_DYNAMO_SWITCH, "1")
    has_transformer_engine = on_cuda and importlib.util.find_spec("transformer_engine") is not None
    if not has_transformer_engine:
        from megarl.platform import megatron_without_te

        megatron_without_te.install()
    if on_cuda:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank)
        return Platform(
            kind="cuda",
            collective_backend="nccl",
            layer_backend="te" if has_transformer_engine else "torch",
            device=f"cuda:{local_rank}",
        )
    from megarl.platform import megatron_cpu

    megatron_cpu.install()
    return Platform(kind="cpu", collective_backend="gloo", layer_backend="torch", device="cpu")
