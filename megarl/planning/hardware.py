"""GPUs: what they can do on paper, and which share of it is reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """One GPU and its links, from the vendor's data sheet."""

    name: str
    tflops: float
    """Dense bfloat16, in 10^12 operations a second."""
    memory_gib: float
    bandwidth: float
    """Of its memory, bytes a second."""
    link: float
    """To the GPUs of its node, bytes a second in one direction."""
    network: float = 50e9
    """To other nodes, bytes a second: one 400 Gbit/s adapter for each GPU."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(name="a100", tflops=312, memory_gib=80, bandwidth=2.0e12, link=300e9, network=25e9),
        GPU(name="h20", tflops=148, memory_gib=96, bandwidth=4.0e12, link=450e9),
        GPU(name="h100", tflops=989, memory_gib=80, bandwidth=3.35e12, link=450e9),
        GPU(name="h200", tflops=989, memory_gib=141, bandwidth=4.8e12, link=450e9),
        GPU(name="b200", tflops=2250, memory_gib=180, bandwidth=8.0e12, link=900e9),
    )
}

GPUS_A_NODE = 8
"""Tensor parallelism beyond this leaves the node's fast links."""

# The efficiencies below are set so that NeMo-RL 0.4's published GRPO runs come out right but for a factor of 1.6
# (`tests/planning/test_step_time.py`): they are those of another trainer, with another engine.

DENSE_EFFICIENCY = 0.50
"""Of the peak that the passes of a dense model reach while they compute. With the communication that `communication`
counts, TP8 on H100 comes to an MFU of about 0.35, where Megatron-Core reports 0.41-0.48 for pre-training."""

MOE_EFFICIENCY = 0.20
"""The same for a mixture of experts, whose matrix products are small and whose tokens are sorted twice a layer. At 671B
the one published MFU of RL is 0.19 (verl, on H20, which computes a seventh as fast as H100 and moves as much)."""

DECODE_EFFICIENCY = 0.45
"""Of the memory bandwidth that decoding reaches."""

MOE_DECODE_EFFICIENCY = 0.30
"""The same where each sequence reads experts of its own."""

COLLECTIVE_EFFICIENCY = 0.60
"""Of a link that large collectives reach."""

ALL_REDUCE_LATENCY_S = 15e-6
"""Of one small all-reduce within a node, CUDA graphs on."""
CROSS_NODE_LATENCY_S = 45e-6
"""The same between nodes."""
DECODE_OVERHEAD_S = 1.5e-3
"""Of one decoding step outside the model: scheduling, sampling, gathering log-probs."""
