"""Bytes on each rank in each phase of a step. All ranks of a pipeline stage hold the same: stages stand for ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from megarl.config.layout import Layout
from megarl.config.schema import RunConfig
from megarl.planning.activations import (
    GPU,
    PassSettings,
    Recompute,
    backward_bytes,
    chunk_activations,
    logits_bytes,
    working_bytes,
)
from megarl.planning.architecture import Architecture, Head
from megarl.planning.parameters import RankParameters, engine_parameters, stage_chunks, stage_parameters
from megarl.planning.schedule import peak_in_flight
from megarl.planning.sync_plan import bucket_bytes

GIB = 2**30

RESERVED_BYTES = 2 * GIB
"""What is not there for tensors: CUDA's context and kernels (about 0.6 GiB), cuBLAS's workspace, NCCL's buffers of a
dozen groups, and what the allocator cannot use. By estimate."""

EXPERT_LOAD = 1.5
"""Tokens of the busiest expert-parallel rank over the mean, which a plan has to have room for: nothing balances the
router during RL. By estimate."""

LOGPROB_BUFFER_BYTES = 2 * 256 * 2**20
"""The two float32 buffers with which log-probs walk over the logits on a GPU (`platform.Platform.chunk_bytes`)."""

TIGHT = 0.05
"""Of a GPU's memory: with less to spare a run may still run out of it."""

_FLOAT32 = 4
_MOMENTS = 2
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


class Phase(StrEnum):
    """When memory is held."""

    LOAD = "load"
    ROLLOUT = "rollout"
    LOGPROBS = "log-probs"
    UPDATE = "update"
    SYNC = "sync"


class Item(StrEnum):
    """What holds memory."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    ENGINE = "engine weights"
    KV_CACHE = "KV cache"
    BUFFERS = "buffers"
    RESERVED = "reserved"


Bytes = Mapping[Item, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelUse:
    """One model that a run holds in the actor's layout."""

    name: str
    architecture: Architecture
    head: Head
    trains: bool
    max_tokens: int
    """Of a micro-batch on one data-parallel rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVRoom:
    """The engine's cache on each of its ranks."""

    sequence_bytes: float
    """Of one sequence of the greatest length."""
    wanted: float
    """For `rollout.max_num_seqs` of them."""
    given: float
    """What there is room for, at most `wanted`; less than one sequence means that generating cannot work."""
    takes_what_is_left: bool
    """SGLang's cache is as large as memory allows, and more sequences wait. The transformers engine's has to fit whole.
    """

    @property
    def needed(self) -> float:
        """Without which generating cannot work."""
        return self.sequence_bytes if self.takes_what_is_left else self.wanted

    @property
    def sequences(self) -> int:
        """Sequences of the greatest length that there is room for."""
        return int(self.given // self.sequence_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The ranks of one pipeline stage."""

    stage: int
    ranks: range
    layers: int
    parameters: int
    """Of the actor, on each rank."""
    phases: dict[Phase, Bytes]
    """What is held; a KV cache that takes what is left with the least that it needs."""

    def total(self, phase: Phase) -> float:
        return sum(self.phases[phase].values())

    @property
    def worst_phase(self) -> Phase:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> float:
        return self.total(self.worst_phase)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Memory of a run."""

    limit: float
    """Bytes of one GPU."""
    stages: list[StageMemory]
    kv: KVRoom | None
    """None where nothing is generated, or engines have GPUs of their own."""
    has_servers: bool
    """Whether they have."""

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def missing(self) -> float:
        """Bytes by which the worst rank is over the limit; 0 where the run fits."""
        return max(self.worst.peak - self.limit, 0.0)


def gradient_bytes(parameters: RankParameters) -> int:
    """Of the gradient buffers: float32 whatever the weights are."""
    return _FLOAT32 * parameters.total


def optimizer_bytes(parameters: RankParameters, layout: Layout, element_bytes: int, *, distributed: bool) -> float:
    """AdamW's two moments and, where weights are not float32, float32 copies of them.

    The distributed optimizer shares dense weights over data- and context-parallel ranks, and those of experts over the
    ranks that hold the same experts: of 256 experts over 512 ranks there may be one copy, and nothing to share.
    """
    per_weight = _FLOAT32 * (_MOMENTS + (element_bytes != _FLOAT32))
    if not distributed:
        return per_weight * parameters.total
    return per_weight * (parameters.dense / (layout.dp * layout.cp) + parameters.expert / layout.expert_dp)


def models_of(config: RunConfig) -> list[ModelUse]:
    """The models of a run, the trained one first.

    For kinds that only learn from data it is the only one: what a reference or a teacher says is computed before.

    Raises:
        ConfigError: a config.json that cannot be read.
    """
    actor, tokens = Architecture.from_hf(config.model.path), config.actor.max_tokens_per_micro_batch
    head = Head.SCORE if config.trainer.kind == "reward_model" else Head.LOGITS
    models = [ModelUse(name="actor", architecture=actor, head=head, trains=True, max_tokens=tokens)]
    if not (config.trainer.kind == "rl" or _generates(config)):
        return models
    critic, reward, is_rl = config.critic, config.reward.model, config.trainer.kind == "rl"
    if is_rl and config.algorithm.adv_estimator == "gae":
        models.append(
            ModelUse(
                name="critic",
                architecture=Architecture.from_hf(critic.path) if critic.path else actor,
                head=Head.VALUE,
                trains=True,
                max_tokens=critic.max_tokens_per_micro_batch or tokens,
            )
        )
    if is_rl and (config.actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        models.append(ModelUse(name="reference", architecture=actor, head=Head.LOGITS, trains=False, max_tokens=tokens))
    if reward.path:
        models.append(
            ModelUse(
                name="reward model",
                architecture=Architecture.from_hf(reward.path),
                head=Head.SCORE,
                trains=False,
                max_tokens=reward.max_tokens_per_micro_batch or tokens,
            )
        )
    return models


def plan_memory(
    config: RunConfig, world_size: int, limit: float, *, micro_batches: int, models: list[ModelUse] | None = None
) -> MemoryPlan:
    """Memory of each pipeline stage in each phase.

    Args:
        limit: bytes of one GPU.
        micro_batches: of one optimizer step on one data-parallel rank.
        models: `models_of(config)`, where the caller has it already.
    """
    layout = config.parallel.layout(world_size)
    models = models or models_of(config)
    resident = [_resident(config, layout, stage, models) for stage in range(layout.pp)]
    has_servers = _generates(config) and bool(config.rollout.servers)
    has_engine = _generates(config) and not has_servers
    kv = _kv_room(config, models[0].architecture, limit, resident) if has_engine else None
    ranks = world_size // layout.pp
    layers = layout.stage_layers(models[0].architecture.shape.num_layers)
    return MemoryPlan(
        limit=limit,
        kv=kv,
        has_servers=has_servers,
        stages=[
            StageMemory(
                stage=stage,
                ranks=range(stage * ranks, (stage + 1) * ranks),
                layers=layers[stage],
                parameters=stage_parameters(models[0].architecture, layout, stage, models[0].head).total,
                phases=_phases(config, layout, stage, models, resident[stage], kv, micro_batches),
            )
            for stage in range(layout.pp)
        ],
    )


def pass_settings(config: RunConfig, layout: Layout, max_tokens: int) -> PassSettings:
    """Settings of a full micro-batch whose every token is predicted: the dearest that there can be."""
    tokens = -(-max_tokens // layout.cp)
    return PassSettings(
        tokens=tokens,
        sequence_tokens=config.data.max_prompt_length + config.data.max_response_length,
        predicted=tokens,
        element_bytes=ELEMENT_BYTES[config.model.dtype],
        kernels=GPU,
        recompute=Recompute(
            granularity=config.model.recompute_granularity,
            method=config.model.recompute_method,
            num_layers=config.model.recompute_num_layers,
        ),
        expert_load=EXPERT_LOAD if layout.ep > 1 else 1.0,
    )


def _generates(config: RunConfig) -> bool:
    if config.trainer.kind == "preference":
        return config.preference.rounds > 0
    return config.trainer.kind == "rl" and config.rollout.engine != "dataset" and config.rollout.replay_dir is None


def _resident(config: RunConfig, layout: Layout, stage: int, models: list[ModelUse]) -> Bytes:
    """What is held from the beginning to the end."""
    element = ELEMENT_BYTES[config.model.dtype]
    held: dict[Item, float] = {Item.WEIGHTS: 0, Item.GRADIENTS: 0, Item.OPTIMIZER: 0}
    for model in models:
        parameters = stage_parameters(model.architecture, layout, stage, model.head)
        held[Item.WEIGHTS] += element * parameters.total
        if model.trains:
            held[Item.GRADIENTS] += gradient_bytes(parameters)
            held[Item.OPTIMIZER] += optimizer_bytes(
                parameters, layout, element, distributed=config.parallel.use_distributed_optimizer
            )
    return {**held, Item.RESERVED: RESERVED_BYTES}


def _kv_room(config: RunConfig, actor: Architecture, limit: float, resident: list[Bytes]) -> KVRoom:
    size, element = config.rollout.tensor_model_parallel_size, ELEMENT_BYTES[config.model.dtype]
    # A latent belongs to all heads, so every rank of an engine has it whole; with fewer heads than ranks each has one.
    share = 1.0 if actor.shape.latent else 1 / min(size, actor.shape.num_kv_heads)
    longest = config.data.max_prompt_length + config.data.max_response_length
    sequence = longest * actor.key_value_cache_elements() * element * share
    wanted = sequence * config.rollout.max_num_seqs
    if config.rollout.engine == "transformers":  # allocates all of it
        return KVRoom(sequence_bytes=sequence, wanted=wanted, given=wanted, takes_what_is_left=False)
    engine = element * engine_parameters(actor, size)
    left = limit - engine - max(sum(held.values()) for held in resident)
    given = max(min(left, wanted), 0.0)
    return KVRoom(sequence_bytes=sequence, wanted=wanted, given=given, takes_what_is_left=True)


def _phases(
    config: RunConfig,
    layout: Layout,
    stage: int,
    models: list[ModelUse],
    resident: Bytes,
    kv: KVRoom | None,
    micro_batches: int,
) -> dict[Phase, Bytes]:
    actor, element = models[0].architecture, ELEMENT_BYTES[config.model.dtype]
    engine: Bytes = {}
    if kv is not None:
        size = config.rollout.tensor_model_parallel_size
        engine = {Item.ENGINE: element * engine_parameters(actor, size), Item.KV_CACHE: kv.needed}
    # SGLang releases both outside of rollout; the transformers engine keeps both.
    asleep = engine if config.rollout.engine == "transformers" else {}
    settings = {model.name: pass_settings(config, layout, model.max_tokens) for model in models}
    updates = [_update(layout, stage, model, settings[model.name], micro_batches) for model in models if model.trains]
    update: Bytes = max(updates, key=_size)
    forward: Bytes = max((_forward(layout, stage, model, settings[model.name]) for model in models), key=_size)
    found = {
        Phase.LOAD: _load(config, layout, stage, models, resident),
        Phase.LOGPROBS: {**resident, **asleep, **forward},
        Phase.UPDATE: {**resident, **asleep, **update},
    }
    if engine:
        found[Phase.ROLLOUT] = {**resident, **engine}
    if _generates(config):
        largest = element * actor.shape.hidden_size * max(actor.shape.vocab_size, actor.shape.ffn_size)
        cache = asleep.get(Item.KV_CACHE, 0.0)
        # A bucket, and the messages that fill the next one, where a rank does not hold the model alone.
        bucket = min(max(bucket_bytes(config.rollout), largest), element * engine_parameters(actor, 1))
        buffers = bucket * (2 if layout.pp * layout.replica_block > 1 else 1)
        found[Phase.SYNC] = {**resident, **engine, Item.KV_CACHE: cache, Item.BUFFERS: buffers}
    return {phase: found[phase] for phase in Phase if phase in found}


def _load(config: RunConfig, layout: Layout, stage: int, models: list[ModelUse], resident: Bytes) -> Bytes:
    """Loading holds what stays; for a moment weights are there twice, when they move into Megatron-Core's buffers.

    The optimizer of the model whose turn it is has not been made then.
    """
    element = ELEMENT_BYTES[config.model.dtype]
    *_, last = [model for model in models if model.trains]
    parameters = stage_parameters(last.architecture, layout, stage, last.head)
    distributed = config.parallel.use_distributed_optimizer
    if not distributed:
        return resident
    state = optimizer_bytes(parameters, layout, element, distributed=True)
    copy = element * parameters.total
    if copy <= state:
        return resident
    return {**resident, Item.OPTIMIZER: resident[Item.OPTIMIZER] - state, Item.BUFFERS: copy}


@functools.lru_cache(maxsize=4096)
def _update(layout: Layout, stage: int, model: ModelUse, settings: PassSettings, micro_batches: int) -> Bytes:
    chunks = [
        chunk_activations(model.architecture, layout, chunk, model.head, settings)
        for chunk in stage_chunks(layout, model.architecture.shape.num_layers, stage)
    ]
    has_logits = stage == layout.pp - 1 and model.head is Head.LOGITS
    logits = logits_bytes(model.architecture, layout, settings) if has_logits else 0.0
    activations = peak_in_flight(layout, stage, micro_batches, chunks)
    other = activations
    if logits:
        without = [*chunks[:-1], replace(chunks[-1], head=chunks[-1].head - logits)]
        other = peak_in_flight(layout, stage, micro_batches, without)
    return {
        Item.ACTIVATIONS: other,
        Item.LOGITS: activations - other,
        Item.BUFFERS: backward_bytes(model.architecture, layout, settings) + LOGPROB_BUFFER_BYTES * has_logits,
    }


@functools.lru_cache(maxsize=4096)
def _forward(layout: Layout, stage: int, model: ModelUse, settings: PassSettings) -> Bytes:
    has_logits = stage == layout.pp - 1 and model.head is Head.LOGITS
    return {
        Item.ACTIVATIONS: working_bytes(model.architecture, layout, settings),
        Item.LOGITS: logits_bytes(model.architecture, layout, settings) if has_logits else 0.0,
        Item.BUFFERS: float(LOGPROB_BUFFER_BYTES * has_logits),
    }


def _size(held: Mapping[Item, float]) -> float:
    return sum(held.values())


def describe_peak(plan: MemoryPlan) -> Iterator[str]:
    """Which rank is the worst, in which phase, and what it holds there; a line each."""
    worst = plan.worst
    held = sorted(worst.phases[worst.worst_phase].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in held if size >= 0.05 * GIB)
    yield (
        f"worst: pipeline stage {worst.stage} (ranks {worst.ranks[0]}-{worst.ranks[-1]}, {worst.layers} layers) in "
        f"{worst.worst_phase}, {worst.peak / GIB:.1f} of {plan.limit / GIB:.1f} GiB: {parts}"
    )
    if (1 - TIGHT) * plan.limit < worst.peak <= plan.limit:
        yield f"tight: less than {100 * TIGHT:.0f} % of a GPU are left, and activations are known within 15 %"
    if plan.has_servers:
        yield "rollout.servers have GPUs of their own: neither they nor the time of rollouts and syncs are in this plan"
    if plan.kv is not None:
        wanted = round(plan.kv.wanted / plan.kv.sequence_bytes)
        yield (
            f"KV cache: room for {plan.kv.sequences} of {wanted} sequences of the greatest length on each engine "
            f"({plan.kv.given / GIB:.1f} of {plan.kv.wanted / GIB:.1f} GiB a rank"
            + ("; in the table with one)" if plan.kv.takes_what_is_left else ")")
        )
