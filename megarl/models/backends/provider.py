"""Which class serves each role of a transformer layer in the torch backend."""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from megarl.models.backends.attention import PackedAttention
from megarl.models.backends.layers import (
    ColumnParallelGroupedLinear,
    DuplicatedLinear,
    LayerNormColumnParallelLinear,
    Norm,
    RowParallelGroupedLinear,
)


class TorchSpecProvider(BackendSpecProvider):
    """Megatron-Core's question "which class for …?", answered in plain torch."""

    def linear(self) -> type:
        return DuplicatedLinear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return PackedAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules]:
        if moe_use_grouped_gemm:
            return TEGroupedMLP, MLPSubmodules(
                linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear
            )
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    def activation_func(self) -> None:  # type: ignore[override]
        return None
