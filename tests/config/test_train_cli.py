"""`launch/train.py` answers questions about a config without loading torch."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from megarl.config.load import CONFIG_FOLDER
from tests.launch import LIMIT_S, ROOT

TRAIN = ROOT / "launch" / "train.py"
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
QWEN25_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def train(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")} | environment
    return subprocess.run([sys.executable, TRAIN, *arguments], capture_output=True, text=True, timeout=LIMIT_S, env=env)


@pytest.fixture
def files(tmp_path):
    """Overrides that give a config files which exist, with a model of the given sizes."""

    def overrides(sizes: dict) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
        data = tmp_path / "data.parquet"
        data.touch()
        models = [f"{key}={tmp_path}" for key in ("model.path", "critic.path", "reward.model.path")]
        return [*models, f"data.train_files={data}", f"data.val_files={data}"]

    return overrides


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--help-config"], ["--config", "gsm8k_smollm2_grpo.yaml", "--check"]], ids=" ".join
)
def test_neither_torch_nor_transformers_is_imported(arguments):
    program = (
        "import runpy, sys\n"
        f"sys.argv = [{str(TRAIN)!r}, *{arguments!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'megatron', 'numpy'} & set(sys.modules)\n"
        "    print('HEAVY', sorted(heavy), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S)
    assert "HEAVY []" in result.stderr


def test_help_shows_the_sections_and_how_to_see_the_keys():
    result = train("--help")
    assert result.returncode == 0
    for words in ("--check", "--help-config", "rollout", "algorithm", "trainer"):
        assert words in result.stdout


def test_help_config_shows_the_keys_of_a_section():
    text = train("--help-config", "rollout").stdout
    assert "rollout.n=8" in text and "Samples of each prompt" in text
    assert "optim.lr" not in text
    assert "optim.lr" in train("--help-config").stdout


@pytest.mark.parametrize(
    ("config", "sizes", "world_size", "layout"),
    [
        ("gsm8k_smollm2_grpo.yaml", SMOLLM2_135M, 2, "2 ranks = DP2"),
        ("70b_grpo.yaml", LLAMA_70B, 64, "64 ranks = TP8 × PP4 × DP2"),
        ("70b_ppo.yaml", LLAMA_70B, 128, "128 ranks = TP8 × PP8 × DP2"),
        *((path.name, QWEN25_7B, 8, "8 ranks = TP4 × DP2") for path in sorted(CONFIG_FOLDER.glob("recipe_*.yaml"))),
    ],
)
def test_check_accepts_an_example_where_its_files_exist(config, sizes, world_size, layout, files):
    result = train("--config", config, "--check", "--world-size", str(world_size), *files(sizes), "optim.lr=2e-6")
    assert (result.returncode, result.stderr) == (0, "")
    assert layout in result.stdout
    resolved = yaml.safe_load(result.stdout)  # the facts about the layout are comments
    assert float(resolved["optim"]["lr"]) == 2e-6
    assert resolved["trainer"]["kind"] == "rl"


def test_check_lists_every_problem_without_a_traceback(files):
    result = train("--config", "70b_grpo.yaml", "--check", "--world-size", "60", *files(LLAMA_70B), "rollout.n=1")
    assert (result.returncode, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert lines[0] == "3 problems:"  # the world, the group of one, and engines of 8 ranks in a world of 60
    assert all(line.startswith("- ") and line.endswith(".") for line in lines[1:])


def test_under_torchrun_the_world_is_its_world_and_one_rank_speaks(files):
    arguments = ["--config", "gsm8k_smollm2_grpo.yaml", "--check", *files(SMOLLM2_135M)]
    assert "4 ranks = DP4" in train(*arguments, RANK="0", WORLD_SIZE="4").stdout
    assert train(*arguments, RANK="3", WORLD_SIZE="4").stdout == ""
    refused = train(*arguments, "rollout.n=1", RANK="3", WORLD_SIZE="4")
    assert (refused.returncode, refused.stderr) == (2, "")


def test_a_config_is_needed():
    result = train("--check")
    assert result.returncode == 2
    assert "--config FILE is needed" in result.stderr
