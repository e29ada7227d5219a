"""The weight map: what simulated ranks hold is what real ranks hold, and a shard that is wrong is found and named."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.layout import Layout
from megarl.planning.architecture import Architecture, Head
from megarl.planning.weight_map import Held, Parameter, Piece, cover_problem, map_problems, rank_classes
from megarl.planning.weight_map_run import WeightMap, run_proofs
from megarl.planning.weight_sections import map_problems as sentences
from megarl.planning.weight_sections import map_section
from megarl.weights.safetensors_io import SafetensorsReader
from tests.launch import LIMIT_S, ROOT, environment, torchrun
from tests.planning.model_configs import DEEPSEEK_V3, write_model
from tests.tiny_models import DENSE, MOE, make_hf_model

HEADS = {"causal_lm": Head.LOGITS, "critic": Head.VALUE, "reward": Head.SCORE}
FAMILIES = (*DENSE, *MOE)


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    ranks: int
    layout: dict[str, Any] = field(default_factory=dict)
    role: str = "causal_lm"

    @property
    def name(self) -> str:
        sizes = " ".join(f"{key}={value}" for key, value in self.layout.items()) or "one"
        return f"{self.model}, {self.ranks}: {sizes}, {self.role}"

    @property
    def whole_layout(self) -> Layout:
        return Layout(world_size=self.ranks, **self.layout)


TP2_EP2 = {"tp": 2, "ep": 2, "etp": 1}
UNEVEN = {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "first_stage_layers": 1, "last_stage_layers": 3}
REAL_CASES = [
    *(Case(model=model, ranks=2, layout={"tp": 2}) for model in FAMILIES),
    *(Case(model=model, ranks=2, layout={"pp": 2}) for model in FAMILIES),
    *(Case(model=model, ranks=2, layout={"ep": 2}) for model in MOE),
    *(Case(model="qwen3", ranks=2, layout={"pp": 2}, role=role) for role in ("critic", "reward")),
    Case(model="llama", ranks=4, layout={"tp": 4}),  # more ranks than key/value heads
    *(Case(model=model, ranks=4, layout=TP2_EP2) for model in ("qwen2_moe", "glm4_moe", "mixtral")),
    Case(model="qwen2", ranks=4, layout={"pp": 2, "vpp": 2}),
    Case(model="deepseek_v3", ranks=4, layout=UNEVEN),
]
DAMAGED_DENSE = Case(model="qwen3", ranks=8, layout={"tp": 2, "pp": 2})
DAMAGED_MOE = Case(model="qwen3_moe", ranks=8, layout={"tp": 2, "pp": 2, "ep": 2, "etp": 2})
CASES = [
    *REAL_CASES,
    DAMAGED_DENSE,
    DAMAGED_MOE,
    *(Case(model=model, ranks=32, layout={"tp": 2, "pp": 4, "ep": 4, "etp": 1}) for model in MOE),
    Case(model="llama", ranks=32, layout={"tp": 2, "pp": 2, "cp": 4}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformers' own files of every family."""
    folder = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        make_hf_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def simulated(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Held], dict]]:
    """By case, what every class of ranks holds and the architecture's tensors."""
    file = tmp_path_factory.mktemp("simulated") / "results.pickle"
    program, cases = ROOT / "tests/planning/map_ranks.py", json.dumps([as_json(case) for case in CASES])
    command = [sys.executable, str(program), "simulated", str(models), str(file), cases]
    subprocess.run(command, env=environment(LIMIT_S), cwd=ROOT, check=True, timeout=LIMIT_S)
    return pickle.loads(file.read_bytes())


def as_json(case: Case) -> dict[str, Any]:
    return {key: getattr(case, key) for key in ("model", "ranks", "layout", "role", "name")}


@pytest.fixture(scope="module")
def real(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """By case, what each real rank's export plan says that it holds."""
    folder, found = tmp_path_factory.mktemp("real"), {}
    for ranks in sorted({case.ranks for case in REAL_CASES}):
        cases = [as_json(case) for case in REAL_CASES if case.ranks == ranks]
        file = folder / f"{ranks}.json"
        torchrun(ranks, "tests/planning/map_ranks.py", "real", models, file, json.dumps(cases), timeout=280)
        found |= json.loads(file.read_text())
    return found


def problems_of(case: Case, held: list[Held], tensors: dict, models: Path) -> list[str]:
    architecture = Architecture.from_hf(models / case.model)
    return map_problems(held, tensors, architecture, case.whole_layout, HEADS[case.role])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_shards_of_all_ranks_are_the_model(simulated: dict, models: Path, case: Case) -> None:
    held, tensors = simulated[case.name]
    assert sorted(rank for of_class in held for rank in of_class.ranks.ranks) == list(range(case.ranks))
    assert problems_of(case, held, tensors, models) == []


@pytest.mark.parametrize("case", REAL_CASES, ids=lambda case: case.name)
def test_a_simulated_rank_holds_what_the_real_one_exports(simulated: dict, real: dict, case: Case) -> None:
    held, _ = simulated[case.name]
    for rank, exported in enumerate(real[case.name]):
        (of_class,) = [of_class for of_class in held if rank in of_class.ranks.ranks]
        boxes: dict[str, list] = {}
        for parameter in of_class.parameters:
            for piece in parameter.pieces:
                if not parameter.is_copy and all(start < stop for start, stop in piece.box):
                    boxes.setdefault(piece.tensor, []).append([list(bounds) for bounds in piece.box])
        assert boxes == exported


@pytest.mark.parametrize("model", FAMILIES)
def test_the_architectures_tensors_are_those_that_transformers_writes(
    simulated: dict, models: Path, model: str
) -> None:
    _, tensors = simulated[Case(model=model, ranks=2, layout={"tp": 2}).name]
    reader = SafetensorsReader(models / model)
    assert tensors == {name: reader.info(name).shape for name in reader.names()}


def test_a_reward_model_has_a_score_and_a_critic_a_bias_besides(simulated: dict) -> None:
    for role, expected in (
        ("reward", {"score.weight": (1, 64)}),
        ("critic", {"score.weight": (1, 64), "score.bias": (1,)}),
    ):
        _, tensors = simulated[Case(model="qwen3", ranks=2, layout={"pp": 2}, role=role).name]
        _, of_lm = simulated[Case(model="qwen3", ranks=2, layout={"pp": 2}).name]
        assert tensors == {name: shape for name, shape in of_lm.items() if name != "lm_head.weight"} | expected


Change = Callable[[Parameter], Parameter | None]


def damaged(held: list[Held], rank: int, parameter: str, change: Change) -> list[Held]:
    """`held` with one parameter of the class of `rank` changed, or left out."""
    assert any(p.name == parameter for of in held if rank in of.ranks.ranks for p in of.parameters)
    result = []
    for of_class in held:
        if rank in of_class.ranks.ranks:
            changed = (change(p) if p.name == parameter else p for p in of_class.parameters)
            of_class = replace(of_class, parameters=tuple(p for p in changed if p is not None))
        result.append(of_class)
    return result


def with_pieces(change: Callable[[Piece], Piece | None], tensor: str) -> Change:
    """Changes the pieces of a parameter that belong to `tensor`."""

    def apply(parameter: Parameter) -> Parameter:
        changed = (change(piece) if piece.tensor == tensor else piece for piece in parameter.pieces)
        return parameter._replace(pieces=tuple(piece for piece in changed if piece is not None))

    return apply


def shifted(rows: int) -> Callable[[Piece], Piece]:
    return lambda piece: piece._replace(
        box=((piece.box[0][0] + rows, piece.box[0][1] + rows), *piece.box[1:]),
    )


FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
NORM, HF_NORM = "decoder.final_layernorm.weight", "model.norm.weight"
EXPERT_FC2 = "decoder.layers.1.mlp.experts.linear_fc2.weight1"
EXPERT_DOWN = "model.layers.1.mlp.experts.1.down_proj.weight"


def found_in(simulated: dict, models: Path, case: Case, rank: int, parameter: str, change: Change) -> str:
    held, tensors = simulated[case.name]
    return "\n".join(problems_of(case, damaged(held, rank, parameter, change), tensors, models))


def test_a_missing_shard_is_named(simulated: dict, models: Path) -> None:
    drop = with_pieces(lambda piece: None, GATE)
    found = found_in(simulated, models, DAMAGED_DENSE, 1, FC1, drop)
    assert f"{FC1} of rank 1: its part [0:64, :] is missing" in found
    # Ranks 0 and 2 have tensor-parallel rank 0, which holds the first half.
    assert f"Of {GATE} [128, 64] the part [64:128, :] is missing; Ranks 0, 2 hold [0:64, :]" in found


def test_a_rank_without_one_of_its_parameters_is_named(simulated: dict, models: Path) -> None:
    found = found_in(simulated, models, DAMAGED_DENSE, 5, NORM, lambda parameter: None)
    numbers = re.fullmatch(r"Rank 5 maps (\d+) weights, where the memory plan counts (\d+)\.", found)
    assert numbers and int(numbers[2]) - int(numbers[1]) == 64


def test_a_tensor_that_no_rank_holds_is_named(simulated: dict, models: Path) -> None:
    held, tensors = simulated[DAMAGED_DENSE.name]
    more = {**tensors, "model.layers.0.self_attn.sinks": (4,)}
    assert problems_of(DAMAGED_DENSE, held, more, models) == ["No rank holds model.layers.0.self_attn.sinks [4]."]


def test_a_tensor_that_the_architecture_does_not_have_is_named(simulated: dict, models: Path) -> None:
    held, tensors = simulated[DAMAGED_DENSE.name]
    fewer = {name: shape for name, shape in tensors.items() if name != HF_NORM}
    assert problems_of(DAMAGED_DENSE, held, fewer, models) == [
        f"Ranks 4, 5, 6 and 1 more hold a tensor {HF_NORM}, which the architecture does not have."
    ]


def test_a_shape_that_ranks_take_for_another_is_named(simulated: dict, models: Path) -> None:
    held, tensors = simulated[DAMAGED_DENSE.name]
    (problem,) = problems_of(DAMAGED_DENSE, held, {**tensors, GATE: (130, 64)}, models)
    assert problem == f"Rank 0 takes {GATE} to have shape [128, 64], but it has [130, 64]."


def test_a_shard_that_another_rank_holds_as_well_is_named(simulated: dict, models: Path) -> None:
    found = found_in(simulated, models, DAMAGED_DENSE, 1, FC1, with_pieces(shifted(-64), GATE))
    assert f"Of {GATE} [128, 64] the part [64:128, :] is missing; Ranks 0, 1, 2 and 1 more hold [0:64, :]" in found


def test_a_shard_that_a_rank_of_another_stage_holds_as_well_is_named(simulated: dict, models: Path) -> None:
    held, tensors = simulated[DAMAGED_DENSE.name]
    (copied,) = [p for p in held[0].parameters if p.name == FC1]
    doubled = [replace(of, parameters=(*of.parameters, copied)) if 4 in of.ranks.ranks else of for of in held]
    found = "\n".join(problems_of(DAMAGED_DENSE, doubled, tensors, models))
    assert f"Ranks 4, 6 hold {GATE}[0:64, :], which belongs on ranks 0, 1, 2 and 1 more." in found


def test_a_shard_that_is_there_twice_on_one_rank_is_named(simulated: dict, models: Path) -> None:
    double = lambda parameter: parameter._replace(pieces=(*parameter.pieces, parameter.pieces[0]))
    found = found_in(simulated, models, DAMAGED_DENSE, 0, FC1, double)
    assert f"{FC1} of rank 0: its part [0:64, :] comes twice." in found
    assert f"Ranks 0, 2 hold {GATE}[0:64, :] twice." in found


def test_a_shard_that_is_shifted_is_named_with_what_it_leaves_out(simulated: dict, models: Path) -> None:
    found = found_in(simulated, models, DAMAGED_DENSE, 1, FC1, with_pieces(shifted(-1), GATE))
    assert (
        f"Of {GATE} [128, 64] the part [63:64, :] comes twice; Ranks 0, 2 hold [0:64, :]; Ranks 1, 3 hold [63:127, :]."
        in found
    )
    outside = found_in(simulated, models, DAMAGED_DENSE, 1, FC1, with_pieces(shifted(1), GATE))
    assert f"Of {GATE} [128, 64] the part [65:129, :] lies outside" in outside


def test_exchanged_shards_are_named_though_they_cover_the_tensor(simulated: dict, models: Path) -> None:
    held, tensors = simulated[DAMAGED_DENSE.name]
    for rank, rows in ((0, 64), (1, -64)):
        held = damaged(held, rank, FC1, with_pieces(shifted(rows), GATE))
    assert problems_of(DAMAGED_DENSE, held, tensors, models) == [
        f"Ranks 0, 2 hold {GATE}[64:128, :], which comes after what tensor-parallel rank 1 holds: the two are "
        "exchanged."
    ]


def test_a_box_in_a_part_of_another_size_is_named(simulated: dict, models: Path) -> None:
    shorten = with_pieces(lambda piece: piece._replace(local_box=((0, 63), (0, 64))), GATE)
    found = found_in(simulated, models, DAMAGED_DENSE, 0, FC1, shorten)
    assert f"{FC1} of rank 0: {GATE}[0:64, :] is put into a part of another size, [0:63, :]." in found


def test_an_expert_on_the_wrong_expert_parallel_rank_is_named(simulated: dict, models: Path) -> None:
    other = "model.layers.1.mlp.experts.3.down_proj.weight"
    misplace = lambda parameter: parameter._replace(
        pieces=tuple(piece._replace(tensor=other) for piece in parameter.pieces)
    )
    found = found_in(simulated, models, DAMAGED_MOE, 0, EXPERT_FC2, misplace)
    assert re.search(rf"Rank 0 holds {re.escape(other)}\[:, 0:16\], which belongs on ranks 2, 3\.", found)
    assert f"Of {EXPERT_DOWN} [64, 32] the part [:, 0:16] is missing" in found


def test_a_replica_that_lacks_its_copy_is_named(simulated: dict, models: Path) -> None:
    """Ranks of one stage that differ in expert-parallel place are two classes, and hold the same but for experts."""
    name, tensor = "decoder.layers.1.self_attention.linear_proj.weight", "model.layers.1.self_attn.o_proj.weight"
    found = found_in(simulated, models, DAMAGED_MOE, 2, name, lambda parameter: None)
    assert f"Rank 2 lacks {tensor}[:, 0:64], which rank 0 holds." in found


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 2), (0, 3)), ((2, 4), (0, 3))], None),
        ([((0, 4), (0, 3))], None),
        ([((0, 4), (0, 1)), ((0, 4), (1, 3))], None),
        ([], "[:, :] is missing"),
        ([((0, 1), (0, 3)), ((2, 4), (0, 3))], "[1:2, :] is missing"),
        ([((0, 3), (0, 3)), ((2, 4), (0, 3))], "[2:3, :] comes twice"),
        ([((0, 4), (0, 3)), ((0, 4), (0, 3))], "[:, :] comes twice"),
        ([((0, 5), (0, 3))], "[0:5, :] lies outside"),
        ([((0, 2), (0, 3)), ((2, 4), (0, 1))], "is cut along dimensions 0, 1 at once"),
    ],
)
def test_cover_says_what_is_wrong_with_boxes(boxes: list, problem: str | None) -> None:
    assert cover_problem((4, 3), boxes) == problem


def test_ranks_that_differ_in_data_and_context_parallel_places_are_one_class() -> None:
    layout = Layout(world_size=32, tp=2, pp=2, cp=2, ep=4, etp=1)
    classes = rank_classes(layout)
    assert sorted(rank for of_class in classes for rank in of_class.ranks) == list(range(32))
    for of_class in classes:
        places = [layout.coordinates(rank) for rank in of_class.ranks]
        assert {(at.tp, at.pp, at.ep, at.etp) for at in places} == {
            (of_class.tp, of_class.pp, of_class.ep, of_class.etp)
        }
        assert len({(at.dp, at.cp) for at in places}) == len(places)


def test_deepseek_v3_with_all_its_layers_and_experts_is_mapped(tmp_path: Path) -> None:
    widths = {
        "vocab_size": 1000,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
    folder = write_model(tmp_path, {**DEEPSEEK_V3, **widths})
    sizes = {"tp": 2, "pp": 4, "ep": 8, "etp": 1, "first_stage_layers": 16, "last_stage_layers": 15}
    (answer,) = run_proofs([(folder, Layout(world_size=32, **sizes), "causal_lm")])
    assert answer["problems"] == []
    # 61 layers of 7 weights of latent attention and 2 norms; 3 dense with 3 matrices; 58 with 256 experts and a shared
    # one of 3 matrices each, the router and its bias; embedding, last norm, head.
    assert answer["tensors"] == 61 * 9 + 3 * 3 + 58 * (257 * 3 + 2) + 3
    assert answer["built"] == 32


def test_a_model_that_cannot_be_built_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {**DEEPSEEK_V3, "num_experts_per_tok": 6, "topk_group": 2})
    (answer,) = run_proofs([(folder, Layout(world_size=32, pp=4, ep=8), "causal_lm")])
    (problem,) = answer["problems"]
    assert problem.startswith("num_experts_per_tok 6 with topk_group 2")


def test_a_process_that_fails_says_how_it_ended(tmp_path: Path) -> None:
    folder = write_model(tmp_path, DEEPSEEK_V3)
    with pytest.raises(RuntimeError, match=r"the weight map could not be built .* is not a valid Role"):
        run_proofs([(folder, Layout(), "none")])


CONFIG = """
model: {path: model}
data: {train_files: prompts.parquet, train_batch_size: 8, max_prompt_length: 64, max_response_length: 64}
algorithm: {adv_estimator: gae}
actor: {ppo_mini_batch_size: 8, max_tokens_per_micro_batch: 512}
parallel: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}
rollout: {engine: sglang, n: 1, tensor_model_parallel_size: 2}
trainer: {val_before_train: false, test_freq: -1}
"""


def run_plan(folder: Path, *options: str) -> dict[str, Any]:
    (folder / "run.yaml").write_text(CONFIG)
    command = [sys.executable, str(ROOT / "launch/plan.py"), "--config", "run.yaml", "--gpus", "8", "--json", *options]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_the_command_maps_actor_and_critic_unless_told_not_to(models: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(models / "qwen3")
    plan = run_plan(tmp_path)
    actor, critic = plan["weight_map"]["models"]
    assert (actor["models"], critic["models"]) == (["actor"], ["critic"])
    assert (actor["problems"], critic["problems"]) == ([], [])
    assert (actor["built"], critic["built"]) == (4, 4)  # the other four are their data-parallel copies
    # Of the vocabulary there is a score and a bias left.
    assert actor["elements"] - critic["elements"] == 262 * 64 - 64 - 1
    assert plan["sync"]["tensors"] == actor["tensors"]
    assert "weight_map" not in run_plan(tmp_path, "--no-map")


def test_the_plan_shows_the_first_problems_and_counts_the_others() -> None:
    broken = WeightMap(models=("actor", "reference"), problems=[f"problem {n}." for n in range(12)])
    shown = sentences([broken])
    assert shown[0] == "Weight map of the actor: problem 0."
    assert shown[-1] == "Weight map of the actor: 2 more problems of this kind (all in --json)."
    section = map_section([broken], 8)
    assert section.lines == ["actor and reference: not proven, 12 problems; the first are below"]
    assert len(section.data["models"][0]["problems"]) == 12
