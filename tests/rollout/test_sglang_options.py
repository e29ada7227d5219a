"""Where an engine of several ranks stands, and what SGLang is started with: arithmetic, without SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.config import RunConfig, load_config, validate
from megarl.config.load import CONFIG_FOLDER
from megarl.config.sglang_options import SET_ELSEWHERE, UNUSABLE, annotations_of, known_options, option_problems
from megarl.config.show import to_yaml
from megarl.rollout.engine import SamplingParams
from megarl.rollout.sglang.environment import CPU_STANDINS, server_environment
from megarl.rollout.sglang.options import EngineSettings, engine_arguments
from megarl.rollout.sglang.placement import Placement, place, place_beside_server, place_server
from megarl.rollout.sglang.sampling import is_cut_off, kept_tokens

SETTINGS = EngineSettings(
    model_path="models/x",
    dtype="bfloat16",
    max_tokens=1000,
    max_num_seqs=64,
    gpu_memory_utilization=0.6,
    seed=7,
    options={"attention_backend": "fa3"},
)


def arguments_of(rank: int, size: int, per_node: int, **kwargs: object) -> dict[str, object]:
    return engine_arguments(SETTINGS, place(rank, size, per_node), **{"on_cpu": False, "address": None, **kwargs})


def test_engines_within_a_node_have_devices_of_their_own() -> None:
    for rank in range(16):
        placement = place(rank, 4, 8)
        assert placement.ranks == range(rank // 4 * 4, rank // 4 * 4 + 4)
        assert placement.is_leader == placement.starts_process == (rank % 4 == 0)
        arguments = arguments_of(rank, 4, 8)
        assert (arguments["tp_size"], arguments["nnodes"], arguments["node_rank"]) == (4, 1, 0)
        assert arguments["base_gpu_id"] == rank % 8 // 4 * 4


def test_an_engine_over_nodes_is_started_on_each_of_them() -> None:
    placements = [place(rank, 16, 8) for rank in range(32)]
    assert [p.rank for p in placements if p.starts_process] == [0, 8, 16, 24]
    assert [p.rank for p in placements if p.is_leader] == [0, 16]
    assert [(p.nodes, p.node, p.base_device) for p in placements if p.starts_process] == [
        (2, 0, 0),
        (2, 1, 0),
        (2, 0, 0),
        (2, 1, 0),
    ]
    arguments = arguments_of(24, 16, 8, address="node-2:5000")
    assert (arguments["nnodes"], arguments["node_rank"], arguments["dist_init_addr"]) == (2, 1, "node-2:5000")


@pytest.mark.parametrize(("size", "per_node"), [(3, 8), (12, 8), (8, 6)])
def test_an_engine_that_shares_a_node_with_part_of_another_is_refused(size: int, per_node: int) -> None:
    with pytest.raises(ValueError, match=f"divisor or a multiple of {per_node}"):
        place(0, size, per_node)


def test_equally_many_consecutive_ranks_share_a_server() -> None:
    placements = [place_beside_server(rank, 4) for rank in range(8)]
    assert [placement.engine for placement in placements] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [placement.rank for placement in placements if placement.is_leader] == [0, 4]
    assert placements[5].ranks == range(4, 8)


def test_a_server_has_its_nodes_for_itself_and_a_generator_of_its_own() -> None:
    parts = [place_server(1, 16, 2, node) for node in range(2)]
    assert [(part.nodes, part.node, part.base_device, part.is_leader) for part in parts] == [
        (2, 0, 0, True),
        (2, 1, 0, False),
    ]
    of_sglang = [
        engine_arguments(SETTINGS, part, on_cpu=False, address="a:1", gives_memory_back=False) for part in parts
    ]
    assert of_sglang[0]["random_seed"] == of_sglang[1]["random_seed"] == SETTINGS.seed + 1
    assert not of_sglang[0]["enable_memory_saver"]
    with pytest.raises(ValueError, match="over 3 nodes: choose a divisor of 16"):
        place_server(0, 16, 3, 0)


def test_engines_draw_from_generators_of_their_own() -> None:
    seeds = {arguments_of(rank, 2, 8)["random_seed"] for rank in range(0, 16, 2)}
    assert len(seeds) == 8


def test_the_users_options_come_last() -> None:
    arguments = arguments_of(0, 1, 8)
    assert arguments["attention_backend"] == "fa3"
    assert arguments["mem_fraction_static"] == 0.6
    assert arguments["enable_memory_saver"]


def test_a_cpu_has_a_cache_for_what_runs_at_once_and_no_memory_saver() -> None:
    arguments = arguments_of(0, 1, 1, on_cpu=True)
    assert arguments["max_total_tokens"] >= 64 * 1000
    assert "enable_memory_saver" not in arguments and "mem_fraction_static" not in arguments


def placement_of(size: int) -> Placement:
    return place(0, size, size)


def test_the_engine_does_not_see_torchruns_world() -> None:
    of_torchrun = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "r",
        "GROUP_RANK": "0",
        "ROLE_RANK": "1",
    }
    result = server_environment({**of_torchrun, "HOME": "/root"}, placement_of(1), on_cpu=False, cores=[0])
    assert of_torchrun.keys().isdisjoint(result)
    assert result["HOME"] == "/root"


def test_stand_ins_are_on_the_path_of_cpu_engines_alone() -> None:
    before = {"PYTHONPATH": "/mine"}
    assert server_environment(before, placement_of(1), on_cpu=False, cores=[0])["PYTHONPATH"] == "/mine"
    on_cpu = server_environment(before, placement_of(1), on_cpu=True, cores=[0])
    assert on_cpu["PYTHONPATH"] == f"{CPU_STANDINS}:/mine"


@pytest.mark.parametrize(
    ("size", "cores", "shares"), [(2, [0, 1, 4, 5], "0,4|1,5"), (2, [3], "3|3"), (1, [0, 1], None)]
)
def test_a_cpu_engines_processes_share_out_the_cores(size: int, cores: list[int], shares: str | None) -> None:
    result = server_environment({}, placement_of(size), on_cpu=True, cores=cores)
    assert result.get("SGLANG_CPU_OMP_THREADS_BIND") == shares


def sampling(**changes: object) -> SamplingParams:
    return SamplingParams(**{"n": 1, "max_new_tokens": 1, "seed": 0, "stop_token_ids": (), **changes})


def test_only_distributions_that_are_cut_need_the_mass_of_what_is_left() -> None:
    assert not is_cut_off(sampling()) and not is_cut_off(sampling(temperature=0.0, top_p=0.5))
    assert is_cut_off(sampling(top_p=0.9)) and is_cut_off(sampling(top_k=3))


def test_a_top_k_beyond_sglangs_mask_is_refused_with_the_option_that_raises_it() -> None:
    assert kept_tokens(sampling(top_k=50), {}) == 50
    assert 1000 < kept_tokens(sampling(top_p=0.9), {}) < 4096
    with pytest.raises(ValueError, match="sampling_mask_max_tokens to at least 5096"):
        kept_tokens(sampling(top_k=5000), {})
    assert kept_tokens(sampling(top_k=5000), {"sampling_mask_max_tokens": 6000}) == 5000


# Options against the installed SGLang


def test_the_installed_sglang_has_every_argument_that_megarl_sets() -> None:
    known = known_options()
    assert known is not None, "source launch/setup_sglang_cpu.sh"
    for on_cpu in (False, True):
        arguments = arguments_of(0, 2, 8, on_cpu=on_cpu)
        assert not arguments.keys() - set(known)
        # Whatever megarl decides, a person is told where, but for what only a CPU engine needs.
        decided = arguments.keys() - SETTINGS.options.keys() - SET_ELSEWHERE.keys()
        changeable = {"log_level", "sleep_on_idle"}
        for_a_cpu = {"sampling_backend", "grammar_backend", "disable_cuda_graph", "max_total_tokens"}
        assert decided <= changeable | for_a_cpu
    assert not SET_ELSEWHERE.keys() - set(known)


def test_options_that_sglang_lacks_are_refused_with_the_nearest_name() -> None:
    assert list(option_problems({"chunked_prefill_size": 1})) == []
    (problem,) = option_problems({"chunked_prefil_size": 1})
    assert "rollout.sglang.chunked_prefil_size" in problem and "did you mean chunked_prefill_size?" in problem


def test_options_that_megarl_sets_are_refused_with_the_key_to_use() -> None:
    (problem,) = option_problems({"tp_size": 2})
    assert problem == "rollout.sglang.tp_size is set by rollout.tensor_model_parallel_size: leave it out."


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"disable_radix_cache": "maybe"}, "is 'maybe', but must be true or false."),
        ({"chunked_prefill_size": "5"}, "is '5', but must be a whole number."),
        ({"watchdog_timeout": True}, "is True, but must be a number."),
        ({"soft_watchdog_timeout": "long"}, "is 'long', but must be a number."),
        ({"deepep_mode": "x"}, "is 'x', but must be one of auto, normal, low_latency."),
    ],
)
def test_values_that_sglang_would_take_as_something_else_are_refused(options: dict[str, object], words: str) -> None:
    (problem,) = option_problems(options)
    assert problem == f"rollout.sglang.{next(iter(options))} {words}"


def test_values_that_sglang_allows_are_allowed() -> None:
    allowed = {
        "watchdog_timeout": 5,
        "soft_watchdog_timeout": None,
        "fuseep_mode": 2,
        "lora_target_modules": ["q_proj"],
    }
    assert list(option_problems(allowed)) == []


def test_options_with_which_a_run_would_learn_from_something_else_are_refused() -> None:
    (problem,) = option_problems({"preferred_sampling_params": {"min_p": 0.9}})
    assert "rollout.sglang.preferred_sampling_params cannot be used" in problem and "rollout.temperature" in problem
    known = known_options()
    assert known is not None and not UNUSABLE.keys() - set(known)


def test_every_kind_of_value_that_is_looked_at_is_found_in_sglang() -> None:
    known = known_options()
    assert known is not None
    annotations = annotations_of(known)
    assert (annotations["disable_radix_cache"], annotations["page_size"]) == ("bool", "Optional[int]")
    # A few are written otherwise, and SGLang alone looks at them.
    assert len(annotations) > 0.98 * len(known)


def problems_of(**rollout: object) -> list[str]:
    config = RunConfig()
    config.rollout.engine = "sglang"
    for key, value in rollout.items():
        setattr(config.rollout, key, value)
    return [problem for problem in validate(config, 8) if "rollout.sglang" in problem]


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"sglang": {"ep_size": 3}, "tensor_model_parallel_size": 4}, "does not divide rollout.tensor_model_parallel"),
        ({"sglang": {"ep_size": "two"}}, "rollout.sglang.ep_size must be a whole number of at least 1, not 'two'"),
        ({"top_k": 5000}, "rollout.top_k is 5000, but SGLang gives log-probs of at most 4000 tokens"),
    ],
)
def test_settings_that_cannot_go_together_are_named(rollout: dict[str, object], words: str) -> None:
    (problem,) = problems_of(**rollout)
    assert words in problem


def test_options_of_files_and_command_line_come_together(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("rollout: {engine: sglang, sglang: {attention_backend: fa3, page_size: 1}}\n")
    (tmp_path / "run.yaml").write_text("base: base.yaml\nrollout: {sglang: {page_size: 64}}\n")
    config = load_config(tmp_path / "run.yaml", ["rollout.sglang.chunked_prefill_size=2048"])
    assert config.rollout.sglang == {"attention_backend": "fa3", "page_size": 64, "chunked_prefill_size": 2048}
    (tmp_path / "shown.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "shown.yaml").rollout.sglang == config.rollout.sglang


@pytest.mark.parametrize("file", sorted(CONFIG_FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_the_example_configs_name_options_that_exist(file: Path) -> None:
    options = ((yaml.safe_load(file.read_text()).get("rollout") or {}).get("sglang")) or {}
    assert list(option_problems(options)) == []
