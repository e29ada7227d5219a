"""The process groups of a layout, passed on explicitly."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl import platform
from megarl.config.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """This rank's process groups. Built once by `build_groups` and handed to whatever communicates."""

    layout: Layout
    rank: int
    world: dist.ProcessGroup
    tp: dist.ProcessGroup
    """Ranks that share each layer's weights."""
    pp: dist.ProcessGroup
    """Ranks that hold one pipeline, first stage first."""
    cp: dist.ProcessGroup
    """Ranks that share each sequence's tokens."""
    dp: dist.ProcessGroup
    """Ranks that hold the same weights and see different samples."""
    dp_cp: dist.ProcessGroup
    """Ranks over which dense gradients are summed: dp × cp."""
    ep: dist.ProcessGroup
    """Ranks that share out the experts."""
    etp: dist.ProcessGroup
    """Ranks that share each expert's weights."""
    expert_dp: dist.ProcessGroup
    """Ranks over which expert gradients are summed."""
    model_parallel: dist.ProcessGroup
    """Ranks that hold one copy of the model: tp × pp."""
    megatron: ProcessGroupCollection
    """The same groups in Megatron-Core's own structure."""

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1


def build_groups(layout: Layout, *, seed: int = 0, timeout_s: float = 600.0) -> Groups:
    """Makes the process groups of `layout` and seeds the generators that go with them. Collective over the world.

    Args:
        seed: see `platform.seed_everything`.
        timeout_s: how long a collective may wait, in seconds; Megatron-Core counts whole minutes.

    Megatron-Core and mbridge read some sizes from Megatron's global state, so that is set too; megarl itself reads
    only what this returns. A second call replaces the first (tests); the old gloo groups keep their threads, so a
    process should not do it more than a few times.

    Raises:
        ValueError: the layout is not one for this world, with every reason.
    """
    if layout.world_size != dist.get_world_size():
        raise ValueError(f"the layout is for {layout.world_size} ranks, the world has {dist.get_world_size()}")
    problems = layout.problems(None)
    if problems:
        raise ValueError("; ".join(problems))
    platform.current()
    world = dist.group.WORLD
    assert world is not None  # get_world_size answered
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        # Needed here as well as in the model's config: without it mbridge silently builds only the first chunk.
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    megatron = ProcessGroupCollection.use_mpu_process_groups()
    # Megatron-Core's generators are one to a tensor-parallel rank; sequence parallelism asks for them in any forward.
    platform.seed_everything(seed, data_parallel_rank=megatron.dp.rank())
    return Groups(
        layout=layout,
        rank=dist.get_rank(),
        world=world,
        tp=megatron.tp,
        pp=megatron.pp,
        cp=megatron.cp,
        dp=megatron.dp,
        dp_cp=megatron.dp_cp,
        ep=megatron.ep,
        etp=megatron.expt_tp,
        expert_dp=megatron.expt_dp,
        model_parallel=megatron.mp,
        megatron=megatron,
    )
