"""A model that learns: gradient buffers, the optimizer, and one optimizer step over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl import platform
from megarl.config.schema_learning import OptimConfig
from megarl.data.packing import PackedBatch
from megarl.models.build import MegatronModel
from megarl.models.pipeline import OutputFunction, run_pipeline
from megarl.models.router import expert_biases, routers
from megarl.models.router_hook import router_hooks
from megarl.models.router_losses import RouterLosses, RouterLossWeights
from megarl.models.router_replay import RouterPass
from megarl.models.router_statistics import RouterReport, RouterStatistics

_WSD_DECAY_SHARE = 10
"""A tenth of the run decays, where no number of steps is given (arXiv:2404.06395, section 4.3)."""
_UPDATES_PER_STEP = "updates_per_step"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    outputs: list[dict[str, Any]]
    """What the output function handed back for each micro-batch; on the last pipeline stage only."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping, the same on every rank."""
    updated: bool
    """False where the gradient was not finite or a veto was made: weights and expert biases stay as they were."""


Veto = Callable[[list[dict[str, Any]], Callable[[], float]], bool]
"""Says whether an update is to be left out, from the outputs of its micro-batches and a function that gives the norm of
its gradient. Collective over the world, and the same on every rank."""


class TrainableModel:
    """A `MegatronModel` with its gradient buffers and optimizer state."""

    def __init__(
        self,
        model: MegatronModel,
        optimizer: OptimizerConfig,
        *,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        router_losses: RouterLossWeights | None = None,
    ) -> None:
        """Allocates gradient buffers (float32) and optimizer state.

        Args:
            model: with its weights loaded: the optimizer copies them to float32 here.
            optimizer: Megatron-Core's own config; `optimizer_config` makes one.
            overlap_grad_reduce: reduce gradients bucket by bucket during the backward pass.
            overlap_param_gather: gather updated weights during the next forward pass (distributed optimizer).
            router_losses: of a mixture of experts, added to the loss of every mini-batch; None: none.
        """
        self.model = model
        self._router_losses = RouterLossWeights() if router_losses is None else router_losses
        self._statistics = _router_statistics(model)
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

    def accumulate(
        self, batches: Sequence[PackedBatch], output_function: OutputFunction, *, replay_experts: bool = False
    ) -> list[dict[str, Any]]:
        """Zeroes the gradient and fills it from `batches`; returns what `run_pipeline` does.

        Args:
            replay_experts: routers choose the experts that the micro-batches bring along.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return run_pipeline(
            self.model,
            batches,
            output_function,
            forward_only=False,
            chunks=self.chunks,
            routers=self._router_pass(batches, replay_experts),
        )

    def step(
        self,
        batches: Sequence[PackedBatch],
        output_function: OutputFunction,
        *,
        replay_experts: bool = False,
        veto: Veto | None = None,
    ) -> StepResult:
        """One optimizer step over the micro-batches of this data-parallel rank. Collective over the world.

        Args:
            replay_experts: as of `accumulate`.
            veto: asked when the gradient is there; where it says so, on every rank, the update is left out.
        """
        biases = expert_biases(self.model.chunks)
        before = [bias.clone() for bias in biases]
        outputs = self.accumulate(batches, output_function, replay_experts=replay_experts)
        is_finite = self._gradient_is_finite()
        if not is_finite or (veto is not None and veto(outputs, self._gradient_norm)):
            for bias, value in zip(biases, before, strict=True):
                bias.copy_(value)  # Megatron-Core moves them with the reduction of gradients
            return StepResult(
                outputs=outputs, grad_norm=self._gradient_norm() if is_finite else math.nan, updated=False
            )
        updated, grad_norm, _ = self.optimizer.step()
        return StepResult(outputs=outputs, grad_norm=float(grad_norm), updated=bool(updated))

    def router_report(self) -> RouterReport | None:
        """What the routers did in the updates since the last call. Collective over the world.

        Returns:
            None for a dense model, and where there was no update.
        """
        if self._statistics is None:
            return None
        groups = self.model.groups
        holds_biases = groups.tp.rank() == groups.cp.rank() == groups.dp.rank() == 0
        return self._statistics.reduce(groups.world, holds_biases=holds_biases)

    def router_metrics(self) -> dict[str, float]:
        """The metrics of `router_report`. Collective over the world."""
        report, weights = self.router_report(), self._router_losses
        if report is None:
            return {}
        return report.metrics(aux_loss=weights.aux_loss > 0, z_loss=weights.z_loss > 0)

    def _router_pass(self, batches: Sequence[PackedBatch], replay: bool) -> RouterPass | None:
        if self._statistics is None:
            return None
        self._statistics.count_mini_batch()
        weights = self._router_losses
        losses = RouterLosses(weights, batches, self.model.groups) if weights.any else None
        return RouterPass(self.model, replay=replay, losses=losses)

    def _gradient_norm(self) -> float:
        """Global L2 norm of the gradient. Collective over the world.

        `optimizer.step` copies the gradient once more and finds the same.
        """
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

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


def _router_statistics(model: MegatronModel) -> RouterStatistics | None:
    """Where the routers of this rank count from now on; None for a dense model."""
    config = model.config
    if config.num_moe_experts is None:
        return None
    statistics = RouterStatistics(
        list(routers(model.chunks)),
        num_layers=config.num_layers,
        num_experts=config.num_moe_experts,
        device=platform.current().device,
    )
    for hook, layer in zip(router_hooks(model.chunks), statistics.layers, strict=True):
        hook.statistics = layer
    return statistics


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


class LearningRateSchedule(OptimizerParamScheduler):
    """Megatron-Core's scheduler, whose rates can be lowered for the rest of a run."""

    factor = 1.0
    """What each rate is multiplied by. Not part of `state_dict`: whoever lowers it says so again after a resume."""
    updates_per_step = 1
    """Optimizer steps in one step of the run."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        return self.factor * super().get_lr(param_group)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), _UPDATES_PER_STEP: self.updates_per_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Stands where the state was taken, in steps of the run: mini-batches may have another size since."""
        before = state_dict.get(_UPDATES_PER_STEP, self.updates_per_step)
        # Megatron-Core adds to where the scheduler stands, which is not the beginning when a run goes back.
        self.num_steps = 0
        super().load_state_dict({**state_dict, "num_steps": state_dict["num_steps"] * self.updates_per_step // before})


def learning_rate_schedule(
    optimizer: MegatronOptimizer, config: OptimConfig, total_steps: int, *, updates_per_step: int = 1
) -> LearningRateSchedule:
    """Megatron-Core's scheduler over the optimizer steps of the whole run. `step(1)` goes before each optimizer step.

    Before, not after: the first step then has the rate of the first step of warm-up and not 0.

    Args:
        total_steps: optimizer steps of the whole run.
        updates_per_step: of these in one step of the run.
    """
    steps = max(total_steps, config.lr_warmup_steps + 1)
    decay = config.lr_wsd_decay_steps or max(steps // _WSD_DECAY_SHARE, 1)
    schedule = LearningRateSchedule(
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
        use_checkpoint_opt_param_scheduler=False,
        # A resumed run goes on with the config's rates; Megatron-Core would end it with an assertion where they differ.
        override_opt_param_scheduler=True,
    )
    schedule.updates_per_step = updates_per_step
    return schedule


def _finalize_gradients(chunks: list[torch.nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron-Core's reduction of gradients, less its division by a token count.

    Losses here are already divided by the global mini-batch, so gradients are summed over ranks and left at that.
    """
    finalize_model_grads(chunks, None, **kwargs)
