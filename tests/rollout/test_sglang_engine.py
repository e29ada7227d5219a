"""The real SGLang does what an engine does: `sglang_program.py` takes one through everything, once for all tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.rollout.engine import FinishReason, Response
from tests.launch import LIMIT_S, ROOT
from tests.rollout.sglang_program import MAX_TOKENS, PROMPTS, SAMPLINGS, STOP
from tests.tiny_models import make_hf_model

EOS = 11
"""What the model's own files say; requests say otherwise."""
TOLERANCE = 1e-4


class Outcome:
    """What the program answered, and the models to compare with."""

    def __init__(self, folder: Path) -> None:
        self.results: dict[str, Any] = torch.load(folder / "results.pt", weights_only=False)
        load = lambda name: AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        self.models = {name: load(name) for name in ("a", "b")}

    @torch.no_grad()
    def logprobs(self, model: str, prompt: list[int], tokens: list[int], **sampling: Any) -> torch.Tensor:
        """[tokens] of the distribution that a sampling means, by transformers: cuts as SGLang makes them, together."""
        logits = self.models[model](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        probs = (logits / (sampling.get("temperature", 1.0) or 1.0)).softmax(-1)
        ordered, order = probs.sort(dim=-1, descending=True)
        dropped = ordered.cumsum(-1) - ordered > sampling.get("top_p", 1.0)
        dropped[:, sampling.get("top_k", probs.shape[1]) :] = True
        kept = ordered.masked_fill(dropped, 0)
        whole = torch.zeros_like(probs).scatter(1, order, kept / kept.sum(-1, keepdim=True))
        return whole.log().gather(1, torch.tensor(tokens)[:, None])[:, 0]

    def assert_drawn_from(self, model: str, responses: list[Response], **sampling: Any) -> None:
        for response in responses:
            expected = self.logprobs(model, PROMPTS[response.request_id], response.token_ids, **sampling)
            torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("sglang")
    for seed, name in enumerate(("a", "b")):
        make_hf_model("qwen3", folder / name, seed=seed, eos_token_id=EOS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, str(ROOT / "tests" / "rollout" / "sglang_program.py"), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == -signal.SIGKILL, result.stdout[-2000:] + result.stderr[-6000:]
    return Outcome(folder)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_log_probs_are_of_the_distribution_that_was_drawn_from(outcome: Outcome, name: str) -> None:
    responses = outcome.results["samplings"][name]
    assert sorted((r.request_id, r.index) for r in responses) == [(i, j) for i in range(3) for j in range(2)]
    # A greedy response has the log-probs of the whole softmax.
    sampling = {} if name == "greedy" else SAMPLINGS[name]
    outcome.assert_drawn_from("a", responses, **sampling)


def test_greedy_responses_have_the_most_likely_tokens(outcome: Outcome) -> None:
    for response in outcome.results["samplings"]["greedy"]:
        prompt = PROMPTS[response.request_id]
        logits = outcome.models["a"](torch.tensor([prompt + response.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert response.token_ids == logits.argmax(-1).tolist()


def test_a_response_ends_with_a_stop_token_or_at_the_limit(outcome: Outcome) -> None:
    for name in SAMPLINGS:
        for response in outcome.results["samplings"][name]:
            stopped = response.finish_reason == FinishReason.STOP
            assert stopped == (response.token_ids[-1] == STOP)
            assert STOP not in response.token_ids[:-1]
            assert stopped or (response.finish_reason == FinishReason.LENGTH and len(response.token_ids) == 12)


def test_the_end_token_of_the_models_files_ends_nothing(outcome: Outcome) -> None:
    responses = outcome.results["endings"]["endless"]
    assert {len(response.token_ids) for response in responses} == {100}
    assert any(EOS in response.token_ids for response in responses), "the test drew no end token: draw more"


def test_a_long_response_does_not_hold_up_a_short_one(outcome: Outcome) -> None:
    first, second = outcome.results["endings"]["beside"]
    assert (first.request_id, len(first.token_ids), second.request_id, len(second.token_ids)) == (1, 3, 0, 100)


def test_an_abort_brings_out_what_there_is(outcome: Outcome) -> None:
    endings = outcome.results["endings"]
    assert endings["before abort"].request_id == 2
    (aborted,) = endings["aborted"]
    assert aborted.finish_reason == FinishReason.ABORT
    assert len(aborted.token_ids) == len(aborted.logprobs) < 100


def test_an_iterator_that_is_closed_early_leaves_a_working_engine(outcome: Outcome) -> None:
    outcome.assert_drawn_from("a", outcome.results["endings"]["after a dropped iterator"])


def test_responses_may_be_as_long_as_the_engine_was_started_for(outcome: Outcome) -> None:
    assert (
        max(len(PROMPTS[r.request_id]) + len(r.token_ids) for r in outcome.results["endings"]["longest"]) == MAX_TOKENS
    )
    assert re.match(r"ValueError: request 0 needs 3 prompt tokens \+ 128 new", outcome.results["endings"]["too long"])


def test_a_response_says_which_weights_drew_which_of_its_tokens(outcome: Outcome) -> None:
    before, *through = outcome.results["update_in_the_middle"]
    assert (before.request_id, before.weight_version, before.weight_versions) == (0, 1, ())
    assert len(through) == 2
    for response in through:
        (start, first), (change, second) = response.weight_versions
        assert (start, first, second, response.weight_version) == (0, 1, 2, 2)
        prompt, tokens = PROMPTS[response.request_id], response.token_ids
        expected = outcome.logprobs("a", prompt, tokens)
        expected[change:] = outcome.logprobs("b", prompt, tokens)[change:]
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=TOLERANCE, rtol=0)


def test_a_wrong_byte_in_a_bucket_is_caught_and_named(outcome: Outcome) -> None:
    refusals = outcome.results["refusals"]
    assert refusals["damaged"].startswith(f"WeightUpdateError: {refusals['damaged name']} arrived changed")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", "model.nothing.weight"),
        ("shape", "model.norm.weight came as [3], and the engine's model has [64]"),
        ("twice", "came twice in one update"),
        ("missing", "tensors did not come"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(outcome: Outcome, case: str, words: str) -> None:
    message = outcome.results["refusals"][case]
    assert message.startswith("WeightUpdateError: ") and words in message


def test_nothing_is_generated_without_complete_weights(outcome: Outcome) -> None:
    for message in (outcome.results["no weights"], outcome.results["refusals"]["generate"]):
        assert message.startswith("RuntimeError: the engine has no complete weights")


def test_an_engine_sleeps_and_wakes_in_stages(outcome: Outcome) -> None:
    sleeping = outcome.results["sleeping"]
    assert sleeping["asleep"].startswith("RuntimeError: the engine sleeps (kv_cache, weights)")
    assert sleeping["no weights"].startswith("RuntimeError: the engine has no complete weights")
    outcome.assert_drawn_from("a", sleeping["awake"])


def test_an_engine_that_is_killed_in_a_rollout_is_seen(outcome: Outcome) -> None:
    deaths = outcome.results["deaths"]
    assert deaths["rollout"].startswith("EngineDied: its server process was ended by SIGKILL")
    assert "crashed with exit code -9" in deaths["rollout"], "what the process last wrote belongs to the message"
    assert deaths["dead"]
    assert deaths["afterwards"].startswith("EngineDied")


def test_an_engine_that_is_killed_in_a_sync_is_started_again_with_current_weights(outcome: Outcome) -> None:
    deaths = outcome.results["deaths"]
    assert deaths["sync"].startswith("EngineDied")
    outcome.assert_drawn_from("a", deaths["restarted"])
    assert {response.weight_version for response in deaths["restarted"]} == {7}


def test_no_process_outlives_a_rank_that_is_killed(outcome: Outcome) -> None:
    pids = outcome.results["pids"]
    assert len(pids) >= 2
    deadline = time.monotonic() + LIMIT_S / 5
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
