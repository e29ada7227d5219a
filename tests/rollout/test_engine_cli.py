"""What keeps `launch/engine.py` from starting an engine is said in a sentence, before anything starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import LIMIT_S, ROOT, environment
from tests.tiny_models import make_hf_model

SERVERS = "rollout.servers=[a:30000,b:30000]"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_hf_model("qwen3", folder / "model")
    path = folder / "run.yaml"
    path.write_text(
        f"model: {{path: {folder / 'model'}, dtype: float32}}\nrollout: {{engine: sglang}}\n"
        "data: {max_prompt_length: 40, max_response_length: 12}\n"
    )
    return path


def engine(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch/engine.py"), "--config", str(config), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "rollout.servers names none: write host:port"),
        ([SERVERS, "--server", "2"], "--server is 2, but rollout.servers names 2, counted from 0."),
        ([SERVERS, "rollout.engine=transformers"], "but rollout.engine is transformers: set it to sglang"),
        ([SERVERS, "rollout.sglang.tp_size=2"], "rollout.sglang.tp_size is set by rollout.tensor_model_parallel_size"),
        ([SERVERS, "--nnodes", "2"], "name with --rdzv host:port"),
        ([SERVERS, "--nnodes", "2", "--rdzv", "a"], "name with --rdzv host:port"),
        ([SERVERS, "--nnodes", "2", "--node-rank", "2", "--rdzv", "a:1"], "--node-rank is 2, but --nnodes is 2"),
        ([SERVERS, "model.path=/nowhere"], "model.path /nowhere is not a folder"),
        ([SERVERS, "rollout.tensor_model_parallel_size=3"], "does not divide the model's 4 attention heads"),
        ([SERVERS, "rollout.sglang.ep_size=2"], "rollout.sglang.ep_size is 2, which does not divide"),
        ([SERVERS, "rollout.max_num_seqs=0"], "rollout.max_num_seqs is 0, but must be at least 1"),
        ([SERVERS, "rollout.server=x"], "rollout.server"),
    ],
)
def test_a_mistake_is_answered_in_a_sentence(config: Path, arguments: list[str], words: str) -> None:
    result = engine(config, *arguments)
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr


def test_a_port_that_is_taken_is_said_before_the_engine_starts(config: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        result = engine(config, f"rollout.servers=[127.0.0.1:{port}]")
    assert result.returncode == 1
    assert f"cannot start: port {port} of this machine: Address already in use" in result.stderr
