"""What the device is: CPU with gloo or CUDA with NCCL, chosen once for the process.

`current()` answers with the one `Platform`; the first call chooses it and, on a CPU, installs the stand-ins that
Megatron-Core needs there (`megatron_cpu.py`). Nothing else in megarl asks which device it is on.
"""

# First: it silences what the imports of the others would print.
from megarl.platform import warnings_of_libraries as _warnings_of_libraries  # noqa: F401
from megarl.platform.device import Platform, current
from megarl.platform.dtypes import parse_dtype
from megarl.platform.process_group import init_distributed, is_peer_failure, shutdown_distributed
from megarl.platform.rendezvous import RanksMissingError
from megarl.platform.seeds import seed_everything

__all__ = [
    "Platform",
    "RanksMissingError",
    "current",
    "init_distributed",
    "is_peer_failure",
    "parse_dtype",
    "seed_everything",
    "shutdown_distributed",
]
