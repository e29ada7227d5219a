"""`launch/quickstart.sh --tiny` goes the whole way: a new model, data, SFT, GRPO, export, summary.

A few steps only: what it takes to learn is minutes, which a person who runs the quickstart sees for themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.launch import LIMIT_S, ROOT
from tests.trainers.tiny_run import read_metrics

STEPS, WARMUP, RATE = 7, 5, 3e-4
"""Of this run, and of configs/tiny_grpo.yaml: the decay begins within the run."""


def quickstart(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch/quickstart.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quickstart") / "output"
    result = quickstart("--tiny", "--steps", STEPS, "--ranks", 1, "--seed", 3, "--output", output)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "held-out questions" in result.stdout
    return output


def test_the_summary_says_what_was_measured(output: Path) -> None:
    summary = json.loads((output / "summary.json").read_text())
    for name in ("accuracy_before", "accuracy_after", "sampled_before", "sampled_after"):
        assert 0 <= summary[name] <= 1, name
    settings = {"config": "configs/tiny_grpo.yaml", "seed": 3, "ranks": 1, "engine": "transformers", "steps": STEPS}
    assert summary["settings"] == settings
    assert set(summary["seconds"]) == {"model", "data", "sft", "train"}
    assert {"megarl", "torch", "megatron-core", "transformers"} <= set(summary["versions"])


def test_the_export_is_a_model_of_under_a_million_parameters_to_transformers(output: Path) -> None:
    folder = output / "run" / "hf"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3142"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]
    summary = json.loads((output / "summary.json").read_text())
    assert model.num_parameters() == summary["parameters"] < 1_000_000


def test_generations_of_both_evaluations_are_kept(output: Path) -> None:
    held_out = json.loads((output / "summary.json").read_text())["held_out_prompts"]
    for kind, samples in (("core", 1), ("sampled", 2)):
        for step in (0, STEPS):
            lines = (output / "run" / "validation" / f"{kind}-step-{step:06d}.jsonl").read_text().splitlines()
            assert len(lines) == held_out * samples
            for line in map(json.loads, lines):
                assert line["ground_truth"] == "".join(sorted(line["prompt"][-1]["content"]))
                assert line["score"] == (line["response"].strip() == line["ground_truth"])


def test_the_learning_rate_warms_up_and_decays_to_nothing(output: Path) -> None:
    rates = [line["actor/lr"] for line in read_metrics(output / "run") if line["step"] > 0]
    rise = [RATE * step / WARMUP for step in range(1, WARMUP + 1)]
    fall = [RATE * (STEPS - step) / (STEPS - WARMUP) for step in range(WARMUP + 1, STEPS + 1)]
    assert rates == pytest.approx(rise + fall)


def test_an_earlier_quickstart_is_not_written_over(output: Path) -> None:
    result = quickstart("--tiny", "--output", output)
    assert result.returncode == 2
    assert "holds an earlier quickstart" in result.stderr and result.stderr.count("\n") == 1
