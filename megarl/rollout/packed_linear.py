"""Linear layers whose weights oneDNN has laid out for its own matrix product, for decoding on a CPU.

A decoding step multiplies few rows by every weight. In the plain layout oneDNN reorders the weight in each call, and
float32 does not go through oneDNN at all: 16 rows × 576 × 3,072 take 393 µs plain and 132 µs packed in float32, 112
and 75 µs in bfloat16 (two cores of an AMD EPYC with AVX-512). The packed copy takes as much memory as the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor multiply packed weights: a CPU with oneDNN."""
    if device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class PackedLinear(nn.Linear):
    """An `nn.Linear` that multiplies with a packed copy of its weight. Inference only.

    The weight remains a parameter under its own name. Whoever changes it calls `pack` again.
    """

    _packed: Tensor | None

    @classmethod
    def wrap(cls, linear: nn.Linear) -> PackedLinear:
        """A packed layer that shares its parameters with `linear`."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer._packed = None
        return layer

    def pack(self, rows: int) -> None:
        """Lays the present weight out anew.

        Args:
            rows: of the products to come; oneDNN chooses the blocking for them, and takes others too.
        """
        # The operators of torch.compile's CPU back end; torch has no public name for them.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), rows)

    def unpack(self) -> None:
        """Frees the packed copy."""
        self._packed = None

    def forward(self, input: Tensor) -> Tensor:
        assert self._packed is not None, "pack() comes before the first product"
        # oneDNN has no product for some strided inputs of four dimensions.
        rows = input.reshape(-1, self.in_features)
        output = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output.view(*input.shape[:-1], self.out_features)


def pack_linears(module: nn.Module) -> list[PackedLinear]:
    """Replaces every `nn.Linear` inside `module`; returns the new layers, not packed yet."""
    layers = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                layers.append(PackedLinear.wrap(child))
                setattr(parent, name, layers[-1])
    return layers
