"""Which experts a transformers model chooses: what `Response.routed_experts` is made of."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor, nn

_ROUTER = "mlp.gate"
"""How the name of a router ends, in every family of transformers 5 that megarl supports."""


class RouterRecorder:
    """Listens to the routers of a model. Each forward pass is taken with `take` before the next one."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ValueError where the model has no routers."""
        routers = [module for name, module in model.named_modules() if name.endswith(_ROUTER)]
        if not routers:
            raise ValueError("the model has no routers to listen to: it is dense")
        self._chosen: list[Tensor] = []
        self.shape = (len(routers), int(routers[0].top_k))
        """Mixtures, and experts that a token goes to in each."""
        for router in routers:  # in the order of layers, which is that of a forward pass
            router.register_forward_hook(self._keep)

    def _keep(self, router: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen.append(output[2])

    def take(self) -> numpy.ndarray:
        """int16 [tokens, mixtures, top-k] of the last forward pass; tokens of several rows one row after another."""
        chosen = torch.stack(self._chosen, dim=1).to(torch.int16).cpu().numpy()
        self._chosen.clear()
        return chosen

    def unknown(self, tokens: int) -> numpy.ndarray:
        """The same of tokens that were not computed: -1."""
        return numpy.full((tokens, *self.shape), -1, dtype=numpy.int16)
