"""Engines that are not on the trainer's ranks: real SGLang servers, started by `launch/engine.py`, fed over gloo.

One of two processes is used by engine objects in this process; then a run of two ranks has one of one process.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config import ConfigError, load_config
from megarl.rollout.engine import EngineDied, Request, Response, SamplingParams, WeightUpdateError
from megarl.rollout.server_engine import ServerEngine
from megarl.rollout.sglang import server_connection
from megarl.rollout.sglang.options import engine_settings
from megarl.rollout.sglang.placement import place_beside_server
from megarl.weights.bucket import Bucket, pack
from megarl.weights.checksum import checksum
from megarl.weights.safetensors_io import SafetensorsReader
from tests.launch import LIMIT_S, ROOT, environment
from tests.rollout.engine_server import EngineServer, engine_server, free_port
from tests.tiny_models import make_hf_model
from tests.trainers.test_sglang_runs import TOLERANCE, assert_engine_and_trainer_agree, make_run
from tests.trainers.tiny_run import read_metrics

PROMPT = [5, 6, 7, 20]
BUCKET_TENSORS = 20
STEPS = 4
"""Of the run: three begin with weights of a sync after an update."""


class Case:
    """A server of two processes, and the models whose weights it gets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.config = make_run(folder, "qwen3", 2, rollout={"servers": [self.address]})
        self.settings = engine_settings(load_config(self.config))
        vocab_size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
        make_hf_model("qwen3", folder / "other", seed=7, vocab_size=vocab_size)

    def engine(self, limit_s: float = LIMIT_S, tensor_parallel_size: int = 2, **changes: Any) -> ServerEngine:
        return ServerEngine(
            dataclasses.replace(self.settings, **changes),
            place_beside_server(0, 1),
            None,
            address=self.address,
            tensor_parallel_size=tensor_parallel_size,
            limit_s=limit_s,
        )

    def buckets(self, model: str) -> list[Bucket]:
        reader = SafetensorsReader(self.folder / model)
        tensors = [(name, reader.read(name)) for name in reader.names()]
        parts = [tensors[start : start + BUCKET_TENSORS] for start in range(0, len(tensors), BUCKET_TENSORS)]
        return [pack(part, {name: checksum(tensor) for name, tensor in part}) for part in parts]

    def update(self, engine: ServerEngine, model: str, version: int) -> None:
        engine.begin_weight_update(version)
        for bucket in self.buckets(model):
            engine.receive_bucket(bucket)
        engine.end_weight_update()

    @torch.no_grad()
    def assert_drawn_by(self, model: str, responses: list[Response]) -> None:
        reference = AutoModelForCausalLM.from_pretrained(self.folder / model, dtype=torch.float32).eval()
        assert responses
        for response in responses:
            logits = reference(torch.tensor([PROMPT + response.token_ids])).logits[0, len(PROMPT) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=TOLERANCE, rtol=0)


def requests(max_new_tokens: int = 8, n: int = 2) -> list[Request]:
    sampling = SamplingParams(n=n, max_new_tokens=max_new_tokens, seed=3, stop_token_ids=())
    return [Request(request_id=0, prompt_ids=PROMPT, sampling=sampling)]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def server(case: Case) -> Iterator[EngineServer]:
    with engine_server(case.config) as started:
        yield started


@pytest.fixture
def engine(case: Case, server: EngineServer) -> Iterator[ServerEngine]:
    connected = case.engine()
    yield connected
    connected.close()


def test_the_server_has_the_weights_that_it_was_sent_after_each_update(case: Case, engine: ServerEngine) -> None:
    for version, model in enumerate(("model", "other", "model")):
        case.update(engine, model, version)
        responses = list(engine.generate(requests()))
        assert {response.weight_version for response in responses} == {version}
        case.assert_drawn_by(model, responses)


def test_a_wrong_byte_is_named_and_the_next_update_is_good(case: Case, engine: ServerEngine) -> None:
    damaged = case.buckets("model")[1]
    entry = damaged.entries[3]
    damaged.data[entry.offset + 5] ^= 4
    engine.begin_weight_update(1)
    engine.receive_bucket(case.buckets("model")[0])
    with pytest.raises(WeightUpdateError, match=re.escape(f"{entry.name} arrived changed")):
        engine.receive_bucket(damaged)
    case.update(engine, "other", 2)
    case.assert_drawn_by("other", list(engine.generate(requests())))


def test_weights_may_change_in_the_middle_of_a_response(case: Case, engine: ServerEngine) -> None:
    case.update(engine, "model", 1)
    running = engine.generate([*requests(2, n=1), dataclasses.replace(requests(40, n=1)[0], request_id=1)])
    next(running)
    engine.pause()
    case.update(engine, "other", 2)
    engine.resume()
    (response,) = running
    assert [version for _, version in response.weight_versions] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 1}, "rollout.tensor_model_parallel_size: 2, and this run has 1"),
        ({"dtype": "bfloat16"}, "model.dtype: float32, and this run has bfloat16"),
        ({"model_path": "third"}, "model.path: a model with the config.json"),
    ],
)
def test_a_run_that_the_server_does_not_fit_is_told_why(
    case: Case, server: EngineServer, changes: dict[str, Any], words: str
) -> None:
    if "model_path" in changes:
        changes = {"model_path": str(make_hf_model("qwen3", case.folder / "third", intermediate_size=192))}
    with pytest.raises(ConfigError) as error:
        case.engine(**changes)
    (problem,) = error.value.problems
    assert problem.startswith(f"rollout.servers: the server {case.address} does not fit: it was started with {words}")
    assert problem.endswith("(asked by rank 0).")


def test_a_second_run_is_told_that_the_server_may_have_another(
    case: Case, engine: ServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "_SLACK_S", 0.0)
    with pytest.raises(ConfigError, match="did not answer within 1 s: it is still starting, or serves another run"):
        case.engine(limit_s=1.0)


def test_whoever_is_no_run_is_sent_away(case: Case, server: EngineServer) -> None:
    with socket.create_connection(("127.0.0.1", int(case.address.split(":")[1]))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        server.wait_until("it is no run")
    case.engine().close()


def test_a_run_that_leaves_in_mid_update_and_mid_response_leaves_a_server_for_the_next(
    case: Case, server: EngineServer
) -> None:
    left = case.engine()
    case.update(left, "model", 1)
    next(left.generate([*requests(2, n=1), dataclasses.replace(requests(45, n=4)[0], request_id=1)]))
    left.pause()
    left.begin_weight_update(2)
    left.receive_bucket(case.buckets("other")[0])
    left.close()
    following = case.engine()
    case.update(following, "other", 3)
    case.assert_drawn_by("other", list(following.generate(requests())))
    following.close()


def test_a_server_that_does_not_answer_is_given_up(
    case: Case, server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "_SLACK_S", 1.0)
    engine = case.engine(limit_s=2.0)
    case.update(engine, "model", 1)
    engine.begin_weight_update(2)
    stopped = server.schedulers()
    for process in stopped:
        process.suspend()
    try:
        with pytest.raises(EngineDied, match=f"the server {case.address} did not answer within 3 s"):
            engine.receive_bucket(case.buckets("model")[0])
        assert engine.is_dead
    finally:
        for process in stopped:
            process.resume()
    engine.close()
    following = case.engine()
    case.update(following, "other", 3)
    case.assert_drawn_by("other", list(following.generate(requests())))
    following.close()


def test_a_server_that_is_killed_in_a_sync_is_named(case: Case, server: EngineServer) -> None:
    """The last test of this server."""
    engine = case.engine()
    first, second = case.buckets("model")[:2]
    engine.begin_weight_update(1)
    engine.receive_bucket(first)
    server.schedulers()[1].kill()
    with pytest.raises(EngineDied, match=f"the server {case.address} closed the connection"):
        engine.receive_bucket(second)
    engine.close()
    assert server.process.wait(LIMIT_S) != 0
    with pytest.raises(ConfigError, match=rf"the server {case.address} is not there after 1 s"):
        case.engine(limit_s=1.0)


def test_a_run_of_two_ranks_agrees_with_its_server_and_ends_with_it(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    rollout = {"servers": [address], "server_timeout_s": 500.0, "update_weights_bucket_megabytes": 1}
    parallel = {"tensor_model_parallel_size": 2}
    config = make_run(tmp_path, "qwen3_moe", 1, steps=1000, rollout=rollout, parallel=parallel)
    metrics = tmp_path / "out" / "metrics.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "launch/train.py"), "--config", str(config)]
    with engine_server(config) as server:
        # It starts beside the run, which waits for it.
        run = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + LIMIT_S
            while not metrics.exists() or len(metrics.read_text().splitlines()) < STEPS:
                assert run.poll() is None, run.communicate()[1][-6000:]
                assert time.monotonic() < deadline, server.output()[-4000:]
                time.sleep(0.1)
            of_server = server.processes()
            server.process.terminate()
            _, said = run.communicate(timeout=LIMIT_S)
        finally:
            run.kill()
            run.wait()
        assert server.process.wait(LIMIT_S) == 0
        _, left = psutil.wait_procs(of_server, timeout=LIMIT_S)
        assert left == []
    assert run.returncode != 0
    died = rf"the engine of rank 0 died: .*the server {address} closed the connection"  # in a sync that is said before
    assert re.search(rf"^rank 0: failed in \w+ of step \d+: {died}", said, re.MULTILINE)
    assert "start that server again with launch/engine.py" in said
    assert "megarl/trainers" not in said, "a traceback says nothing that the sentence does not"
    assert_engine_and_trainer_agree(tmp_path, steps=len(read_metrics(tmp_path / "out")))
