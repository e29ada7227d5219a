"""How long a step takes, from the FLOPs and bytes that it needs and the stated efficiencies of `hardware`.

The efficiencies are set by published runs of another trainer; no part of this is calibrated on a run of megarl on GPUs.
Lengths of responses decide most of it and are a guess of the caller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megarl.config.batches import BatchPlan
from megarl.config.engines import engine_expert_shares
from megarl.config.layout import Layout
from megarl.config.schema import RunConfig
from megarl.planning.architecture import Architecture, Head
from megarl.planning.communication import forward_seconds, group_rate
from megarl.planning.hardware import (
    ALL_REDUCE_LATENCY_S,
    CROSS_NODE_LATENCY_S,
    DECODE_EFFICIENCY,
    DECODE_OVERHEAD_S,
    DENSE_EFFICIENCY,
    GPU,
    GPUS_A_NODE,
    MOE_DECODE_EFFICIENCY,
    MOE_EFFICIENCY,
)
from megarl.planning.memory import ELEMENT_BYTES, MemoryPlan, ModelUse, optimizer_bytes
from megarl.planning.parameters import (
    engine_parameters,
    layers_token_weights,
    stage_chunks,
    stage_parameters,
)
from megarl.planning.schedule import bubble
from megarl.planning.sync_plan import whole_route

BACKWARD_PASSES = 2
"""Forward passes that a backward pass costs: two matrix products for each of the forward pass's."""

UNCERTAINTY = 2.0
"""Factor within which the time of a step is expected, given the lengths: a little more than what published runs are off
by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Mean tokens of a sample; the estimate rests on them."""

    prompt: float
    response: float

    @classmethod
    def half_of_limits(cls, config: RunConfig) -> Lengths:
        """Half of each limit of the config."""
        return cls(prompt=config.data.max_prompt_length / 2, response=config.data.max_response_length / 2)

    @property
    def sample(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One step."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By part of the step."""
    micro_batches: int
    """Of one optimizer step on one data-parallel rank."""
    bubble: float
    """Waiting of pipeline stages over computing, in updates."""
    tokens: float
    """Of prompts and responses, over all ranks."""
    model_flops: float
    """That the mathematics of the step needs, over all ranks; recomputation is not counted (arXiv:2204.02311)."""
    update_flops: float
    """Those of updates alone."""
    gpus: int
    peak_tflops: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak, 0 to 1, of the whole step."""
        return self.model_flops / (self.total * self.gpus * self.peak_tflops * 1e12)

    @property
    def update_mfu(self) -> float:
        """The same of updates alone."""
        return self.update_flops / (self.seconds["update"] * self.gpus * self.peak_tflops * 1e12)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / (self.total * self.gpus)


def forward_flops(architecture: Architecture, tokens: float, sequence_tokens: float, head: Head) -> float:
    """FLOPs of a forward pass over `tokens` tokens in sequences of `sequence_tokens`.

    Two for each weight that a token is multiplied by; causal attention costs half of the square (arXiv:2204.02311,
    appendix B). Low-rank projections of multi-latent attention are counted as what they are.
    """
    shape = architecture.shape
    weights = layers_token_weights(architecture)
    if head is Head.LOGITS:
        weights += shape.hidden_size * shape.vocab_size
    score_and_sum = shape.num_layers * (architecture.shape.query_width + architecture.shape.attention_output_width)
    return tokens * (2 * weights + score_and_sum * sequence_tokens)


def micro_batch_count(config: RunConfig, layout: Layout, lengths: Lengths, max_tokens: int) -> int:
    """Micro-batches of one optimizer step on one data-parallel rank, by mean lengths."""
    batch = BatchPlan.of(config, layout)
    samples = batch.mini_batch_prompts * batch.samples_per_prompt / layout.dp
    whole = max(max_tokens // lengths.sample, 1)  # sequences are not cut
    count = math.ceil(samples / whole)
    return math.ceil(count / layout.pp) * layout.pp if layout.vpp > 1 else count


def estimate_step(
    config: RunConfig, layout: Layout, gpu: GPU, lengths: Lengths, models: list[ModelUse], memory: MemoryPlan
) -> StepTime:
    """The parts of one step in seconds.

    Args:
        lengths: of the mean sample.
        memory: of the same run; the KV cache bounds how many sequences an engine decodes at once.
    """
    batch = BatchPlan.of(config, layout)
    samples = batch.samples * batch.together
    tokens = samples * lengths.sample
    seconds, model_flops = {}, 0.0
    if memory.kv is not None:
        seconds["rollout"] = _rollout_seconds(config, layout, gpu, lengths, models[0].architecture, memory, samples)
        model_flops += forward_flops(models[0].architecture, tokens, lengths.sample, Head.LOGITS)
    seconds["log-probs"] = 0.0
    for model in _forward_passes(config, batch, models):
        model_flops += forward_flops(model.architecture, tokens, lengths.sample, model.head)
        seconds["log-probs"] += _pass_seconds(config, layout, gpu, lengths, model, tokens, 1)
    seconds["update"] = update_flops = 0.0
    for model in models:
        if model.trains:
            epochs = config.critic.ppo_epochs if model.name == "critic" else batch.epochs
            flops = forward_flops(model.architecture, tokens, lengths.sample, model.head)
            update_flops += epochs * flops * (1 + BACKWARD_PASSES)
            again = 1 if config.model.recompute_granularity == "full" else 0
            passes = 1 + BACKWARD_PASSES + again
            seconds["update"] += epochs * _pass_seconds(config, layout, gpu, lengths, model, tokens, passes)
            seconds["update"] += batch.mini_batches * epochs * _optimizer_seconds(config, layout, gpu, model)
    if memory.kv is not None:
        seconds["sync"] = _sync_seconds(config, layout, gpu, models[0].architecture)
    return StepTime(
        seconds=seconds,
        micro_batches=micro_batch_count(config, layout, lengths, models[0].max_tokens),
        bubble=bubble(layout, micro_batch_count(config, layout, lengths, models[0].max_tokens)),
        tokens=tokens,
        model_flops=model_flops + update_flops,
        update_flops=update_flops,
        gpus=layout.world_size,
        peak_tflops=config.observe.peak_tflops or gpu.tflops,
    )


def _forward_passes(config: RunConfig, batch: BatchPlan, models: list[ModelUse]) -> list[ModelUse]:
    """Passes before the update: of every model; of the actor only where its own update cannot give the log-probs."""
    correction = config.algorithm.rollout_correction
    needed = (
        batch.mini_batches * batch.epochs > 1
        or config.algorithm.use_kl_in_reward
        or correction.rollout_is != "none"
        or correction.rollout_rs != "none"
    )
    return [model for model in models if model.name != "actor" or (needed and not batch.row)]


def _efficiency(architecture: Architecture) -> float:
    return MOE_EFFICIENCY if architecture.shape.is_moe else DENSE_EFFICIENCY


def _pass_seconds(
    config: RunConfig, layout: Layout, gpu: GPU, lengths: Lengths, model: ModelUse, tokens: float, passes: int
) -> float:
    """`passes` passes over `tokens` tokens of all ranks; a backward pass is two for computing and one for moving."""
    architecture, element = model.architecture, ELEMENT_BYTES[config.model.dtype]
    flops = passes * forward_flops(architecture, tokens, lengths.sample, model.head)
    peak = (config.observe.peak_tflops or gpu.tflops) * 1e12 * _efficiency(architecture)
    moves = passes - 1 if passes > BACKWARD_PASSES else passes
    moving = moves * forward_seconds(architecture, layout, gpu, element, tokens / layout.dp)
    waiting = bubble(layout, micro_batch_count(config, layout, lengths, model.max_tokens))
    return (flops / (layout.world_size * peak) + moving) * (1 + waiting) * _imbalance(layout, architecture)


def _imbalance(layout: Layout, architecture: Architecture) -> float:
    """The longest pipeline stage over the mean: all stages take as long as it."""
    layers = [
        sum(len(chunk.layers) for chunk in stage_chunks(layout, architecture.shape.num_layers, stage))
        for stage in range(layout.pp)
    ]
    return max(layers) * layout.pp / sum(layers)


def _optimizer_seconds(config: RunConfig, layout: Layout, gpu: GPU, model: ModelUse) -> float:
    """Reducing gradients, gathering weights, and the optimizer's pass over its state, on the busiest stage."""
    element = ELEMENT_BYTES[config.model.dtype]
    worst = 0.0
    for stage in range(layout.pp):
        parameters = stage_parameters(model.architecture, layout, stage, model.head)
        copies = layout.dp * layout.cp
        moved = (4 + element) * parameters.dense * (copies - 1) / copies
        moved += (4 + element) * parameters.expert * (layout.expert_dp - 1) / layout.expert_dp
        rate = group_rate(gpu, layout.world_size // layout.pp)
        state = optimizer_bytes(parameters, layout, element, distributed=config.parallel.use_distributed_optimizer)
        worst = max(worst, moved / rate + 3 * state / gpu.bandwidth)
    return worst


def _rollout_seconds(
    config: RunConfig,
    layout: Layout,
    gpu: GPU,
    lengths: Lengths,
    architecture: Architecture,
    memory: MemoryPlan,
    samples: int,
) -> float:
    """Prefill by FLOPs; decoding by the bytes that each step reads: weights once, the cache of every sequence.

    The last response of a step is as long as allowed, and towards the end it runs nearly alone.
    """
    size, element = config.rollout.tensor_model_parallel_size, ELEMENT_BYTES[config.model.dtype]
    assert memory.kv is not None
    of_engine = samples * size / layout.world_size
    # The cache holds more sequences of mean length than of the greatest.
    longest = config.data.max_prompt_length + config.data.max_response_length
    fitting = max(memory.kv.given / memory.kv.sequence_bytes * longest / lengths.sample, 1.0)
    running = min(of_engine, config.rollout.max_num_seqs, fitting)
    prompts = of_engine / config.rollout.n * lengths.prompt
    prefill = forward_flops(architecture, prompts, lengths.prompt, Head.SCORE)
    prefill /= size * gpu.tflops * 1e12 * _efficiency(architecture)
    cache = memory.kv.sequence_bytes / longest * (lengths.prompt + lengths.response / 2)
    step_of = lambda batch: _decode_seconds(architecture, gpu, size, element, batch, batch * cache)
    full_steps = of_engine * lengths.response / running
    tail = max(config.data.max_response_length - lengths.response, 0.0)
    return prefill + full_steps * step_of(running) + tail * step_of(1)


def _decode_seconds(
    architecture: Architecture, gpu: GPU, size: int, element: int, batch: float, cache_bytes: float
) -> float:
    """One token for each of `batch` sequences of an engine of `size` ranks."""
    shape = architecture.shape
    weights = engine_parameters(architecture, size)
    if shape.is_moe:
        # Experts that no sequence of the batch is sent to are not read.
        share = 1 - (1 - shape.experts_per_token / shape.num_experts) ** batch
        experts = sum(architecture.layer_kinds()) * shape.num_experts * architecture.expert_numel / size
        weights -= (1 - share) * experts
    efficiency = MOE_DECODE_EFFICIENCY if shape.is_moe else DECODE_EFFICIENCY
    reading = (element * weights + cache_bytes) / (gpu.bandwidth * efficiency)
    flops = batch * 2 * (layers_token_weights(architecture) + shape.hidden_size * shape.vocab_size)
    computing = flops / (size * gpu.tflops * 1e12 * _efficiency(architecture))
    all_reduce = 0.0
    if size > 1:
        moved = 2 * batch * element * shape.hidden_size * (size - 1) / size
        latency = ALL_REDUCE_LATENCY_S if size <= GPUS_A_NODE else CROSS_NODE_LATENCY_S
        all_reduce = latency + moved / group_rate(gpu, size)
    return max(reading, computing) + 2 * shape.num_layers * all_reduce + DECODE_OVERHEAD_S


def _sync_seconds(config: RunConfig, layout: Layout, gpu: GPU, architecture: Architecture) -> float:
    """Every engine rank gets whole tensors."""
    rollout = config.rollout
    size, shares = rollout.tensor_model_parallel_size, engine_expert_shares(rollout)
    return whole_route(architecture, layout, gpu, ELEMENT_BYTES[config.model.dtype], size, shares).seconds
