"""`launch/plan.py` says in one go whether a run can work, and what would help, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch import LIMIT_S, ROOT
from tests.planning.model_configs import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B, QWEN3_235B_A22B, write_model

V3_LAYOUT = [
    "parallel.tensor_model_parallel_size=8",
    "parallel.pipeline_model_parallel_size=16",
    "parallel.virtual_pipeline_model_parallel_size=1",
    "parallel.expert_model_parallel_size=32",
    "parallel.expert_tensor_parallel_size=1",
    "parallel.num_layers_in_first_pipeline_stage=3",
    "parallel.num_layers_in_last_pipeline_stage=2",
    "rollout.tensor_model_parallel_size=32",
]


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The weight map takes a minute at this size and has tests of its own.
    command = [sys.executable, ROOT / "launch" / "plan.py", "--no-map", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)


def plan_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = plan(*arguments, "--json")
    return result.returncode, json.loads(result.stdout)


@pytest.fixture
def v3(tmp_path: Path) -> list[str]:
    return [
        "--config",
        "70b_grpo.yaml",
        "--gpus",
        "512",
        f"model.path={write_model(tmp_path, DEEPSEEK_V3)}",
        *V3_LAYOUT,
    ]


@pytest.fixture
def llama(tmp_path: Path) -> list[str]:
    return ["--config", "70b_grpo.yaml", "--gpus", "64", f"model.path={write_model(tmp_path, LLAMA_70B)}"]


@pytest.mark.parametrize(
    ("config", "gpus", "gpu", "model"),
    [
        ("70b_grpo.yaml", 64, "h100", LLAMA_70B),
        ("70b_ppo.yaml", 128, "h100", LLAMA_70B),
        ("30b_a3b_grpo.yaml", 16, "h100", QWEN3_30B_A3B),
        ("235b_a22b_grpo.yaml", 128, "h100", QWEN3_235B_A22B),
        ("671b_grpo.yaml", 512, "h100", DEEPSEEK_V3),
        ("671b_ppo.yaml", 512, "h200", DEEPSEEK_V3),
    ],
)
def test_an_example_config_works_on_the_gpus_that_it_names(
    config: str, gpus: int, gpu: str, model: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(tmp_path, model)
    models = [f"{key}={folder}" for key in ("model.path", "critic.path", "reward.model.path")]
    result = plan("--config", config, "--gpus", str(gpus), "--gpu", gpu, *models)
    assert result.returncode == 0, result.stdout + result.stderr
    text = (ROOT / "configs" / config).read_text(encoding="utf-8")
    assert f"on {gpus} " in text.splitlines()[0] + text.splitlines()[1]


def test_neither_torch_nor_transformers_is_imported(v3: list[str]) -> None:
    program = (
        "import runpy, sys\n"
        "sys.path.insert(0, 'launch')\n"  # as where Python runs the script itself
        f"sys.argv = ['plan.py', *{[*v3, '--search', '--no-map']!r}]\n"
        "try:\n    runpy.run_path('launch/plan.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr


def test_deepseek_v3_on_512_gpus_is_planned_for_people(v3: list[str]) -> None:
    result = plan(*v3, "--gpu-memory", "80")
    assert result.returncode == 0
    assert "671.03 billion weights" in result.stdout
    assert "256 prompts × 16 samples = 4096 samples" in result.stdout
    for phase in ("load", "rollout", "log-probs", "update", "sync"):
        assert phase in result.stdout
    assert "worst: pipeline stage 1 (ranks 32-63" in result.stdout
    assert "published: DeepSeek-V3 671B, 256 × H100" in result.stdout
    assert "not on this machine: data.train_files" in result.stdout
    assert "The run can work on 512 GPUs." in result.stdout


def test_scripts_get_every_stage_and_phase(v3: list[str]) -> None:
    status, answer = plan_json(*v3)
    assert status == 0
    assert answer["works"] and answer["problems"] == []
    memory = answer["memory"]
    assert [stage["ranks"] for stage in memory["stages"]] == [[32 * s, 32 * s + 31] for s in range(16)]
    for stage in memory["stages"]:
        assert stage["peak"] == max(sum(held.values()) for held in stage["phases"].values())
    # One copy of each expert: 12 bytes of optimizer state for each of them on every rank.
    update = memory["stages"][1]["phases"]["update"]
    assert update["optimizer"] == pytest.approx(16.2 * 2**30, rel=0.01)
    assert answer["time"]["step_s"] == pytest.approx(sum(answer["time"]["seconds"].values()))


def test_a_run_that_does_not_fit_says_by_how_much_and_what_would_help(llama: list[str]) -> None:
    small = ["--gpu-memory", "40"]
    result = plan(*llama, *small)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "GiB are missing" in result.stderr
    status, answer = plan_json(*llama, *small)
    assert status == 1
    assert not answer["works"]
    (helping,) = [problem for problem in answer["problems"] if problem.startswith("What would help")]
    first, outcome = helping.removeprefix("What would help: ").split(";")[0].rsplit(" (", 1)
    missing = answer["memory"]["missing"]
    again, changed = plan_json(*llama, *first.split(), *small)
    assert changed["memory"]["missing"] < missing
    assert (again == 0) == (outcome == "fits)")


def test_every_problem_is_listed_at_once_without_a_traceback(v3: list[str]) -> None:
    bad = ["parallel.expert_model_parallel_size=24", "parallel.tensor_model_parallel_size=3", "data.train_batch_size=7"]
    result = plan(*v3, *bad)
    assert result.returncode == 1
    assert "24, which does not divide the model's 256 experts" in result.stderr
    assert "3, which does not divide the model's 128 attention heads" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_architecture_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {**LLAMA_70B, "model_type": "mamba"})
    result = plan("--config", "70b_grpo.yaml", "--gpus", "64", f"model.path={folder}")
    assert result.returncode == 1
    assert "model_type='mamba'" in result.stderr
    assert "deepseek_v3" in result.stderr
    assert result.stderr.count("mamba") == 1


def test_a_config_that_cannot_be_read_has_its_own_status() -> None:
    result = plan("--config", "nowhere.yaml", "--gpus", "8")
    assert result.returncode == 2
    assert "nowhere.yaml was found neither" in result.stderr


@pytest.mark.parametrize(
    "bad",
    [
        ["--gpus", "0"],
        ["--gpus", "8", "--gpu-memory", "-1"],
        ["--gpus", "many"],
        ["--gpus", "8", "--mean-response", "inf"],
        ["--gpus", "8", "--network-gb", "nan"],
    ],
)
def test_sizes_that_are_none_are_refused(bad: list[str]) -> None:
    result = plan("--config", "70b_grpo.yaml", *bad)
    assert result.returncode == 2
    assert bad[-1] in result.stderr


def test_a_mean_length_above_its_limit_is_refused(llama: list[str]) -> None:
    result = plan(*llama, "--mean-response", "1e9")
    assert result.returncode == 2
    assert "--mean-response is 1e+09 tokens, but data.max_response_length is" in result.stderr


def test_a_reader_that_stops_reading_is_no_failure(llama: list[str]) -> None:
    command = [sys.executable, ROOT / "launch" / "plan.py", *llama, "--json", "--no-map"]
    reads, writes = os.pipe()
    os.close(reads)
    result = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, cwd=ROOT)
    os.close(writes)
    assert (result.returncode, result.stderr) == (0, "")


def test_what_the_search_suggests_fits_and_is_ranked(v3: list[str]) -> None:
    status, answer = plan_json(*v3, "--search")
    assert status == 0
    best = answer["search"]["best"]
    assert [item["step_s"] for item in best] == sorted(item["step_s"] for item in best)
    for item in (best[0], best[-1]):
        overrides = [f"{key}={'null' if value is None else value}" for key, value in item["overrides"].items()]
        again, found = plan_json(*v3, *overrides)
        assert again == 0
        assert found["time"]["step_s"] == pytest.approx(item["step_s"])
        assert found["memory"]["missing"] == 0


def test_the_search_helps_where_the_layout_itself_is_impossible(llama: list[str]) -> None:
    status, answer = plan_json(*llama, "parallel.pipeline_model_parallel_size=7", "--search")
    assert status == 1
    assert answer["search"]["fitting"] > 0


def test_a_search_without_a_result_says_so(llama: list[str]) -> None:
    status, answer = plan_json(*llama, "--gpus", "8", "--gpu-memory", "16", "--search")
    assert status == 1
    assert answer["search"] == {"fitting": 0, "best": []}


def test_a_search_varies_an_engine_that_does_not_divide_the_gpus(tmp_path: Path) -> None:
    """70b_grpo.yaml's engines have 8 ranks, more than there are GPUs."""
    folder = write_model(tmp_path, LLAMA_8B)
    result = plan("--config", "70b_grpo.yaml", "--gpus", "4", "--gpu", "h200", "--search", f"model.path={folder}")
    assert result.returncode == 1
    assert "rollout.tensor_model_parallel_size is 8, which does not divide the world size 4" in result.stderr
    assert "no layout fits" not in result.stdout
    assert "rollout.tensor_model_parallel_size=" in result.stdout
