"""Linear layers and norms in plain torch, with Transformer Engine's parameter names.

`linear_qkv.layer_norm_weight`, `experts.linear_fc1.weight0` and so on: mbridge's name map and Megatron-Core's
checkpoints are written for those names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size


class Norm:
    """Builds an RMSNorm or LayerNorm, as the config says (Transformer Engine's `TENorm`)."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:  # type: ignore[misc]
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark_sequence_parallel(norm, config)
        return norm


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole (`TELinear` with `parallel_mode="duplicated"`)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool = False,
        skip_bias_add: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None
        if config.perform_initialization:
            init_method(self.weight)
        _mark_sequence_parallel(self, config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight, self.bias), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, None, sharded_offsets)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm and the column-parallel linear layer after it (`TELayerNormColumnParallelLinear`)."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_bias = None
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        size, eps = x.shape[-1:], self.config.layernorm_epsilon
        if self.config.normalization == "RMSNorm":
            x = F.rms_norm(x, size, self.layer_norm_weight, eps)
        else:
            x = F.layer_norm(x, size, self.layer_norm_weight, self.layer_norm_bias, eps)
        return super().forward(x, *args, **kwargs)


class _GroupedLinear(torch.nn.Module):
    """One linear layer for each local expert, applied to that expert's tokens (`TEGroupedLinear`)."""

    partition_dim: int
    """The weight's dimension that expert tensor parallelism shards."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool = False,
        skip_bias_add: bool = False,
        is_expert: bool = True,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise NotImplementedError("expert layers with a bias are not supported")
        self.num_experts = num_gemms
        self.groups = pg_collection
        shape = [output_size, input_size]
        shape[self.partition_dim] //= pg_collection.expt_tp.size()
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
            if config.perform_initialization:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    init_method(weight)
            set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x: torch.Tensor, tokens_per_expert: Sequence[int]) -> tuple[torch.Tensor, None]:
        """x: [tokens sorted by expert, input]; returns [tokens, output] and no bias."""
        pieces = torch.split(x, list(tokens_per_expert))
        return torch.cat([F.linear(piece, getattr(self, f"weight{i}")) for i, piece in enumerate(pieces)]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The keys of TEGroupedLinear and SequentialMLP, so that checkpoints of either load into this."""
        metadata = metadata or {}
        singleton = metadata.get("singleton_local_shards", False)
        total = get_pg_size(self.groups.ep) * self.num_experts
        first = get_pg_rank(self.groups.ep) * self.num_experts
        out = {}
        for index in range(self.num_experts):
            expert = first + index
            key = f"{expert}.{prefix}" if singleton else prefix
            offsets = sharded_offsets if singleton else (*sharded_offsets, (len(sharded_offsets), expert, total))
            sharded = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{index}")},
                key,
                {"weight": self.partition_dim},
                offsets,
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )[f"{key}weight"]
            sharded.replica_id = (*sharded.replica_id[:2], get_pg_rank(self.groups.expt_dp))
            out[f"{prefix}weight{index}"] = sharded
        return out


class ColumnParallelGroupedLinear(_GroupedLinear):
    """Expert layers sharded by output (`TEColumnParallelGroupedLinear`)."""

    partition_dim = 0


class RowParallelGroupedLinear(_GroupedLinear):
    """Expert layers sharded by input (`TERowParallelGroupedLinear`)."""

    partition_dim = 1


def _mark_sequence_parallel(module: torch.nn.Module, config: Any) -> None:
    """Tells Megatron-Core to sum these gradients over the tensor-parallel group, each rank having seen its tokens."""
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
