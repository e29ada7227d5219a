"""The environment that an engine's processes start in: not a rank's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megarl.rollout.sglang.placement import Placement

CPU_STANDINS = Path(__file__).with_name("cpu_standins")

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES_OF_TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "TORCH_NCCL_")


def server_environment(
    environment: Mapping[str, str], placement: Placement, *, on_cpu: bool, cores: list[int]
) -> dict[str, str]:
    """What a rank's environment becomes for its engine.

    Args:
        cores: that this process may use; a CPU engine of several processes divides them.
    """
    # With torchrun's variables SGLang's own process group would join, or wait for, that of the trainer.
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _OF_TORCHRUN and not name.startswith(_PREFIXES_OF_TORCHRUN)
    }
    # What the processes last wrote is shown when they die: not the warnings of their imports.
    kept.setdefault("PYTHONWARNINGS", "ignore")
    # The context length of an engine is what a run needs; SGLang keeps two positions for itself (`options`).
    kept["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # The engine's processes on further nodes must come back to us, who wait for their end.
    kept["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    if not on_cpu:
        # Megatron-Core's order of launches is the trainer's; SGLang sets its own.
        kept.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        return kept
    kept["SGLANG_USE_CPU_ENGINE"] = "1"
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CPU_STANDINS), environment.get("PYTHONPATH")]))
    if placement.size > 1:
        # Else SGLang wants a NUMA node for each process.
        processes = placement.size // placement.nodes
        shares = [cores[i::processes] or [cores[i % len(cores)]] for i in range(processes)]
        kept["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return kept
