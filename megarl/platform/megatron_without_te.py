"""Stand-ins with which Megatron-Core 0.16.1 runs where Transformer Engine is absent, on a CPU or a GPU.

Paths are relative to `megatron/core/`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def install() -> None:
    """Installs every stand-in. Call it before a Megatron-Core model is built; further calls do nothing."""
    _patch_undefined_names()
    _patch_adam_step()


def _patch_undefined_names() -> None:
    import megatron.core.tensor_parallel.random as mrandom
    import megatron.core.transformer.moe.moe_utils as moe_utils

    # random.py:636 tests `fp8 is not None` with a default of False → NameError at :589
    original = mrandom.CheckpointWithoutOutput.__init__

    def init(self: Any, fp8: Any = False) -> None:
        original(self, fp8 or None)

    mrandom.CheckpointWithoutOutput.__init__ = init
    # moe_utils.py:1192 names it in every router's forward
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _patch_adam_step() -> None:
    """distrib_optimizer.py:940: torch's Adam keeps `step` in its state, a `fully_reshardable` checkpoint does not."""
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    original = distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 or "step" in tensors:
            original(self, model_param, tensors)
            return
        group_index, group_order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][group_order]
        for key, destination in {"param": main_param, **self.optimizer.state[main_param]}.items():
            if key != "step":
                destination.copy_(tensors[key])

    distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = set_states
