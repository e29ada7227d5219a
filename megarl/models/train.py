"""A model that learns: gradient buffers, the optimizer, and one optimizer step over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config.schema_learning import OptimConfig
from megarl.data.packing import PackedBatch
from megarl.models.build import MegatronModel
from megarl.models.pipeline import OutputFunction, run_pipeline
from megarl.models.router import expert_biases

_WSD_DECAY_SHARE = 10
"""A tenth of the run decays, where no number of steps is given (arXiv:2404.06395, section 4.3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    outputs: list[dict[str, Any]]
    """What the output function handed back for each micro-batch; on the last pipeline stage only."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping, the same on every rank."""
    updated: bool
    """False where the gradient was not finite: weights and expert biases stay as they were."""


class TrainableModel:
    """A `MegatronModel` with its gradient buffers and optimizer state."""

    def __init__(
        self,
        model: MegatronModel,
        optimizer: OptimizerConfig,
        *,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
    ) -> None:
        """Allocates gradient buffers (float32) and optimizer state.

        Args:
            model: with its weights loaded: the optimizer copies them to float32 here.
            optimizer: Megatron-Core's own config; `optimizer_config` makes one.
            overlap_grad_reduce: reduce gradients bucket by bucket during the backward pass.
            overlap_param_gather: gather updated weights during the next forward pass (distributed optimizer).
        """
        self.model = model
        config = model.config
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=optimizer.use_distributed_optimizer,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
        )
        self.chunks = [
            # Communication of chunks after the first is overlapped with compute in any case (Megatron-LM).
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(model.chunks)
        ]
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(optimizer, self.chunks)
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = _finalize_gradients
        if overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def accumulate(self, batches: Sequence[PackedBatch], output_function: OutputFunction) -> list[dict[str, Any]]:
        """Zeroes the gradient and fills it from `batches`; returns what `run_pipeline` does."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return run_pipeline(self.model, batches, output_function, forward_only=False, chunks=self.chunks)

    def step(self, batches: Sequence[PackedBatch], output_function: OutputFunction) -> StepResult:
        """One optimizer step over the micro-batches of this data-parallel rank. Collective over the world."""
        biases = expert_biases(self.model.chunks)
        before = [bias.clone() for bias in biases]
        outputs = self.accumulate(batches, output_function)
        if not self._gradient_is_finite():
            for bias, value in zip(biases, before, strict=True):
                bias.copy_(value)  # Megatron-Core moves them with the reduction of gradients
            return StepResult(outputs=outputs, grad_norm=math.nan, updated=False)
        updated, grad_norm, _ = self.optimizer.step()
        return StepResult(outputs=outputs, grad_norm=float(grad_norm), updated=bool(updated))

    def _gradient_is_finite(self) -> bool:
        """Whether every gradient of every rank is a number. Collective over the world.

        Asked before the optimizer step: a NaN that gets into weights and moments cannot be got out again.
        """
        buffers = [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        # A sum is NaN or infinite if any term is, and takes one pass and no memory.
        total = torch.stack([buffer.grad_data.sum() for buffer in buffers]).sum()
        broken = (~torch.isfinite(total)).float()
        dist.all_reduce(broken, op=dist.ReduceOp.MAX)
        return not bool(broken)


def optimizer_config(
    config: OptimConfig, dtype: torch.dtype, *, use_distributed_optimizer: bool, overlap_param_gather: bool = False
) -> OptimizerConfig:
    """Megatron-Core's config for AdamW with float32 master weights and moments (arXiv:1711.05101)."""
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        # Each parameter group has its own, and the scheduler takes that one: left out, a decay subtracts None.
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_param_gather=overlap_param_gather,
    )


def learning_rate_schedule(
    optimizer: MegatronOptimizer, config: OptimConfig, total_steps: int
) -> OptimizerParamScheduler:
    """Megatron-Core's scheduler over the optimizer steps of the whole run. `step(1)` goes before each optimizer step.

    Before, not after: the first step then has the rate of the first step of warm-up and not 0.
    """
    steps = max(total_steps, config.lr_warmup_steps + 1)
    decay = config.lr_wsd_decay_steps or max(steps // _WSD_DECAY_SHARE, 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style="WSD" if config.lr_decay_style == "wsd" else config.lr_decay_style,
        # A decay that reached into the warm-up would begin below the highest rate.
        wsd_decay_steps=min(decay, steps - config.lr_warmup_steps),
        lr_wsd_decay_style=config.lr_wsd_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def _finalize_gradients(chunks: list[torch.nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron-Core's reduction of gradients, less its division by a token count.

    Losses here are already divided by the global mini-batch, so gradients are summed over ranks and left at that.
    """
    finalize_model_grads(chunks, None, **kwargs)
