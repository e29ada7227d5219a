"""Heads: the scalar one of critics and reward models, and which tokens a language model's output layer is for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class LogitSelector:
    """Keeps a language model's output layer to the positions whose logits are read.

    The logits are the largest tensor of a step, and those of prompt tokens and padding are never looked at. Set
    `positions` before each forward pass. It is a hook that runs before the output layer.
    """

    def __init__(self, output_layer: torch.nn.Module, config: Any) -> None:
        """Attaches itself to Megatron-Core's ColumnParallelLinear."""
        self.positions: torch.Tensor | None = None
        """int64 [selected], into the tokens of the micro-batch on this context-parallel rank; None: all."""
        self._sequence_parallel = config.sequence_parallel
        if config.sequence_parallel:
            # Tokens have to be gathered before some are selected. The layer then takes whole tokens, as it does
            # without sequence parallelism, and sums their gradients over tensor-parallel ranks.
            output_layer.sequence_parallel = False  # type: ignore[assignment]
            output_layer.allreduce_dgrad = True  # type: ignore[assignment]
        output_layer.register_forward_pre_hook(self._before)

    def _before(self, layer: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = arguments
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        if self.positions is not None:
            hidden = hidden.index_select(0, self.positions)
        return (hidden, *rest)


class ScalarHead(torch.nn.Module):
    """One number for each token, in place of a language model's output layer.

    Every tensor-parallel rank holds it whole and computes the same values. Under sequence parallelism the tokens are
    gathered first; the backward pass then hands each rank the gradient of its own tokens only, and the head's
    gradient, computed from all tokens, is the same on every rank.
    """

    def __init__(self, config: Any, *, bias: bool) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.empty(1, dtype=config.params_dtype)) if bias else None

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Called as Megatron-Core calls an output layer.

        Args:
            hidden: [tokens (÷ tp under sequence parallelism), 1, hidden size]

        Returns:
            float32 [tokens, 1, 1], and no bias
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, None, sharded_offsets)
