"""The weight plan, without processes: every tensor, exactly once, to every engine rank that needs it, from within its
replica of the model and from near by, in buckets that fit."""

from __future__ import annotations

import collections
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.models.bridge import read_hf_config
from megarl.models.build import Role
from megarl.weights.architecture_tensors import architecture_tensors
from megarl.weights.bucket import aligned
from megarl.weights.geometry import uncovered
from megarl.weights.placement import Heads, own_problem, place_tensors, rank_places
from megarl.weights.plan import EngineLayout, Step, WeightPlan
from megarl.weights.replicas import ReplicaDomain, domain_count
from tests.planning.model_configs import DEEPSEEK_V3, LLAMA_70B, QWEN3_32B, QWEN3_235B_A22B, write_model
from tests.tiny_models import DENSE, MOE, hf_config
from tests.weights.placed import heads, placed

BUCKET_BYTES = 100_000
"""Several to a tiny model, and more than its largest tensor."""


@dataclass(frozen=True, kw_only=True)
class Case:
    ranks: int
    layout: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, int] = field(default_factory=dict)
    ranks_per_node: int = 8
    bucket_bytes: int = BUCKET_BYTES

    @property
    def name(self) -> str:
        sizes = " ".join(f"{key}={value}" for key, value in self.layout.items())
        engine = ", engine " + " ".join(f"{key}={value}" for key, value in self.engine.items()) if self.engine else ""
        return f"{self.ranks}: {sizes}{engine}"

    def plan(self, config: transformers.PretrainedConfig) -> WeightPlan:
        layout = Layout(world_size=self.ranks, **self.layout)
        return WeightPlan(
            placed(config, layout),
            layout,
            EngineLayout(**self.engine),
            num_experts=heads(config).experts,
            bucket_bytes=self.bucket_bytes,
            ranks_per_node=self.ranks_per_node,
        )


DENSE_CASES = [
    Case(ranks=1),
    Case(ranks=4),
    Case(ranks=8, layout={"tp": 4}),  # more ranks than key-value heads, of most families
    Case(ranks=8, layout={"pp": 2, "vpp": 2, "tp": 2}, engine={"tp": 2}),
    Case(ranks=16, layout={"pp": 2, "tp": 2, "cp": 2, "first_stage_layers": 1, "last_stage_layers": 3}),
    Case(ranks=32, layout={"pp": 4, "tp": 2}, engine={"tp": 4}, ranks_per_node=4),
    Case(ranks=8, layout={"pp": 2, "tp": 2}, engine={"tp": 8, "by_first_rank": True}),  # two domains, one takes nothing
    Case(ranks=8, layout={"tp": 2}, engine={"tp": 4, "by_first_rank": True}, ranks_per_node=2),
]
MOE_CASES = [
    Case(ranks=4, layout={"ep": 4}, engine={"tp": 4, "ep": 4}),
    Case(ranks=8, layout={"tp": 2, "ep": 2, "etp": 1}, engine={"tp": 2, "ep": 2}, ranks_per_node=2),
    Case(ranks=8, layout={"tp": 4, "etp": 1}, engine={"tp": 8, "ep": 2}),
    Case(ranks=16, layout={"tp": 2, "ep": 4, "etp": 2, "pp": 2}, engine={"tp": 8, "ep": 4}, ranks_per_node=4),
    Case(ranks=16, layout={"pp": 2, "ep": 2, "cp": 2, "vpp": 2}, engine={"tp": 4, "ep": 4}),  # an engine, two domains
    Case(ranks=16, layout={"ep": 2, "etp": 1, "tp": 2}, engine={"tp": 4, "ep": 2}),
    Case(ranks=16, layout={"pp": 2, "ep": 4}, engine={"tp": 8, "by_first_rank": True}, ranks_per_node=4),
]
ALL = [(case, model) for case in DENSE_CASES for model in (*DENSE, *MOE)]
ALL += [(case, model) for case in MOE_CASES for model in MOE]


def needed(plan: WeightPlan, rank: int, experts: int) -> set[str]:
    """The tensors that the engine's part on a rank needs, from their names alone."""
    found: set[str] = set()
    if plan.engine.by_first_rank:
        return found if rank % plan.engine.tp else {tensor.name for tensor in plan.tensors}
    share = experts // plan.engine.ep
    part = rank % plan.engine.tp // (plan.engine.tp // plan.engine.ep)
    for tensor in plan.tensors:
        _, is_expert, after = tensor.name.partition(".experts.")
        if not is_expert or int(after.split(".")[0]) // share == part:
            found.add(tensor.name)
    return found


def assert_fills_every_tensor_once(plan: WeightPlan, rank: int, steps: list[Step], experts: int) -> None:
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    places = rank_places(plan.layout, rank)
    names = []
    for step in steps:
        boxes = collections.defaultdict(list)
        for name, box in step.copies:
            assert box in [part.box for part in by_name[name].parts if part.place in places]
            boxes[name].append(box)
        for message in step.receives:
            for item in message.items:
                boxes[item.name].append(item.box)
        assert boxes.keys() == {entry.name for entry in step.entries}
        for entry in step.entries:
            tensor = by_name[entry.name]
            assert (entry.shape, entry.dtype) == (tensor.shape, tensor.dtype)
            assert uncovered(entry.shape, boxes[entry.name]) is None, entry.name
        for one, other in itertools.pairwise(step.entries):
            assert one.offset + one.num_bytes <= other.offset
        names += [entry.name for entry in step.entries]
    assert len(names) == len(set(names))
    assert set(names) == needed(plan, rank, experts)


@pytest.mark.parametrize(("case", "model"), ALL, ids=lambda value: value.name if isinstance(value, Case) else value)
def test_every_engine_rank_gets_every_tensor_once_and_every_message_has_two_ends(case: Case, model: str) -> None:
    config = hf_config(model)
    plan = case.plan(config)
    steps = [plan.steps(rank) for rank in range(case.ranks)]
    for rank in range(case.ranks):
        assert_fills_every_tensor_once(plan, rank, steps[rank], heads(config).experts)
        held = rank_places(plan.layout, rank)
        holds = {(tensor.name, part.box) for tensor in plan.tensors for part in tensor.parts if part.place in held}
        for number, step in enumerate(steps[rank]):
            assert all((item.name, item.box) in holds for message in step.sends for item in message.items)
            for peer in range(case.ranks):
                sent = [message.items for message in steps[peer][number].sends if rank in message.receivers]
                taken = [message.items for message in step.receives if message.source == peer]
                assert sent == taken
                assert not taken or peer in plan.domain_of(rank).ranks


@pytest.mark.parametrize(("case", "model"), ALL, ids=lambda value: value.name if isinstance(value, Case) else value)
def test_neither_buckets_nor_their_messages_are_larger_than_was_asked_for(case: Case, model: str) -> None:
    plan = case.plan(hf_config(model))
    assert max(tensor.num_bytes for tensor in plan.tensors) < BUCKET_BYTES
    for rank in range(case.ranks):
        for step in plan.steps(rank):
            assert step.num_bytes <= BUCKET_BYTES
            assert step.staging_bytes <= BUCKET_BYTES
            assert step.num_bytes == sum(aligned(entry.num_bytes) for entry in step.entries)
    # Were they filled badly, there would be many more than one and a half times the bytes need.
    worst = max(sum(step.num_bytes for step in plan.steps(rank)) for rank in range(case.ranks))
    if plan.engine.ep == 1:
        assert len(plan.buckets) <= math.ceil(1.5 * worst / BUCKET_BYTES) + 1


def test_a_tensor_larger_than_a_bucket_has_one_of_its_own() -> None:
    plan = Case(ranks=2, layout={"tp": 2}, bucket_bytes=10_000).plan(hf_config("llama"))
    for bucket in plan.buckets:
        assert len(bucket) == 1 or sum(aligned(tensor.num_bytes) for tensor in bucket) <= 10_000
    assert any(bucket[0].num_bytes > 10_000 for bucket in plan.buckets)


def test_two_matrices_that_an_engine_joins_come_in_one_bucket() -> None:
    plan = Case(ranks=2, layout={"tp": 2}, bucket_bytes=1000).plan(hf_config("deepseek_v3"))
    for bucket in plan.buckets:
        layers = {tensor.name.split(".")[2] for tensor in bucket if "a_proj" in tensor.name}
        for layer in layers:
            names = {tensor.name for tensor in bucket}
            attention = f"model.layers.{layer}.self_attn"
            assert {f"{attention}.q_a_proj.weight", f"{attention}.kv_a_proj_with_mqa.weight"} <= names


LAYOUTS = [
    Layout(world_size=32, tp=2, pp=2, ep=4, etp=1),
    Layout(world_size=32, tp=4, ep=2, etp=1, cp=2),
    Layout(world_size=32, tp=2, cp=2, pp=2),
    Layout(world_size=64, tp=2, pp=4, ep=8, etp=2),
    Layout(world_size=48, pp=3, ep=4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_domains_share_out_the_ranks_and_each_holds_a_whole_model(layout: Layout) -> None:
    domains = [ReplicaDomain(layout, number, 8) for number in range(domain_count(layout))]
    assert sorted(rank for domain in domains for rank in domain.ranks) == list(range(layout.world_size))
    places = {place for rank in range(layout.world_size) for place in rank_places(layout, rank)}
    for number, domain in enumerate(domains):
        assert domain.holders.keys() == places
        assert {layout.replica(rank) for rank in domain.ranks} == {number}


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("ranks_per_node", [4, 8])
def test_the_nearest_holder_gives_and_equally_near_ones_give_alike(layout: Layout, ranks_per_node: int) -> None:
    domain = ReplicaDomain(layout, 0, ranks_per_node)
    node = lambda rank: rank // ranks_per_node
    for place, holders in domain.holders.items():
        sources = domain.sources(place)
        assert sources.keys() == set(domain.ranks)
        for receiver, source in sources.items():
            assert source in holders
            if receiver in holders:
                assert source == receiver
            elif any(node(holder) == node(receiver) for holder in holders):
                assert node(source) == node(receiver)
        for nearest in {node(rank) for rank in domain.ranks}:
            given = collections.Counter(
                source for receiver, source in sources.items() if source != receiver and node(receiver) == nearest
            )
            near = [holder for holder in holders if node(holder) == nearest]
            counts = [given[holder] for holder in near]
            assert not counts or max(counts) - min(counts) <= 1


def test_weights_that_a_rank_has_itself_do_not_travel() -> None:
    """EP8, and an engine that shares its experts in the same way."""
    plan = Case(ranks=4, layout={"ep": 4}, engine={"tp": 4, "ep": 4}).plan(hf_config("qwen3_moe"))
    assert all(not step.receives and not step.sends for rank in range(4) for step in plan.steps(rank))


def test_every_bucket_has_a_share_of_each_stage() -> None:
    """Or the ranks of one stage would fill it while the others wait."""
    plan = Case(ranks=2, layout={"pp": 2}).plan(hf_config("mixtral"))
    for bucket in plan.buckets[:-1]:
        assert {tensor.parts[0].place.stage for tensor in bucket} == {0, 1}


MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
GLM4_MOE = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "use_qk_norm": True,
    "attention_bias": True,
    "max_position_embeddings": 202752,
}
QWEN2_MOE = {
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 20480,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 131072,
}
MIB = 2**20
LARGE = {
    "llama 70B": (LLAMA_70B, Case(ranks=1024, layout={"tp": 8, "pp": 4}, engine={"tp": 8}, bucket_bytes=512 * MIB)),
    "qwen3 32B": (QWEN3_32B, Case(ranks=512, layout={"tp": 8, "pp": 2, "cp": 2}, bucket_bytes=512 * MIB)),
    "qwen3 235B": (
        QWEN3_235B_A22B,
        Case(ranks=256, layout={"tp": 4, "ep": 16, "etp": 1}, engine={"tp": 16, "ep": 16}, bucket_bytes=512 * MIB),
    ),
    "mixtral 8x7B": (MIXTRAL, Case(ranks=128, layout={"tp": 2, "pp": 4, "ep": 8, "etp": 1}, bucket_bytes=512 * MIB)),
    "glm4 355B": (
        GLM4_MOE,
        Case(
            ranks=512,
            layout={"tp": 8, "pp": 4, "ep": 16, "etp": 1},
            engine={"tp": 32, "ep": 32},
            bucket_bytes=512 * MIB,
        ),
    ),
    "qwen2 57B": (
        QWEN2_MOE,
        Case(ranks=64, layout={"pp": 4, "ep": 8, "vpp": 7}, engine={"tp": 8, "ep": 8}, bucket_bytes=512 * MIB),
    ),
    **{
        f"deepseek 671B on {ranks}": (
            DEEPSEEK_V3,
            Case(
                ranks=ranks,
                layout={"tp": 8, "pp": 16, "ep": 32, "etp": 1, "first_stage_layers": 3, "last_stage_layers": 2},
                engine={"tp": 32, "ep": 32},
                bucket_bytes=512 * MIB,
            ),
        )
        for ranks in (512, 1024)
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_published_models_on_up_to_1024_ranks_are_planned_whole(name: str, tmp_path: Path) -> None:
    values, case = LARGE[name]
    config = read_hf_config(write_model(tmp_path, values))
    plan = case.plan(config)
    # Of all ranks: parts make up each tensor, each part is in every domain, and buckets have each tensor once.
    places = {part.place for tensor in plan.tensors for part in tensor.parts}
    for tensor in plan.tensors:
        assert uncovered(tensor.shape, [part.box for part in tensor.parts]) is None, tensor.name
    for domain in plan.domains:
        assert places <= domain.holders.keys()
        assert all(domain.sources(place).keys() == set(domain.ranks) for place in places)
    names = [tensor.name for bucket in plan.buckets for tensor in bucket]
    assert len(names) == len(set(names))
    assert set(names) == architecture_tensors(config, Role.CAUSAL_LM).keys()
    # Of some: their steps, with the other ends of their messages.
    for rank in (0, case.ranks - 1):
        steps = plan.steps(rank)
        assert_fills_every_tensor_once(plan, rank, steps, heads(config).experts)
        peer = next((message.source for step in steps for message in step.receives), None)
        if peer is not None:
            for step, other in zip(steps, plan.steps(peer), strict=True):
                sent = [message.items for message in other.sends if rank in message.receivers]
                assert sent == [message.items for message in step.receives if message.source == peer]


def test_a_rank_that_holds_something_else_than_the_plan_says_is_named() -> None:
    layout = Layout(world_size=2, tp=2)
    tensors = {tensor.name: tensor for tensor in placed(hf_config("llama"), layout)}
    places = rank_places(layout, 1)
    held = {
        name: (tensor.shape, tensor.dtype, frozenset(part.box for part in tensor.parts if part.place in places))
        for name, tensor in tensors.items()
    }
    assert own_problem(tensors, layout, 1, held) is None
    name = "model.layers.2.mlp.up_proj.weight"
    shape, dtype, _ = held[name]
    for wrong in ((shape, dtype, frozenset({((0, 64), (0, 64))})), (shape, torch.float32, held[name][2])):
        assert str(own_problem(tensors, layout, 1, {**held, name: wrong})).startswith("rank 1 holds ")
    del held[name]
    problem = own_problem(tensors, layout, 1, held)
    assert problem is not None
    assert f"None of {name}" in problem


def test_a_module_without_a_rule_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"no rule for model\.layers\.0\.mixer\.in_proj\.weight"):
        sizes = Heads(layers=1, query_heads=1, key_value_groups=1, experts=0)
        place_tensors({"model.layers.0.mixer.in_proj.weight": (4, 4)}, Layout(), sizes, torch.bfloat16)
