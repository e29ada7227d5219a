"""Rounds of preference optimisation: which pairs they make, from which policy, and how they go on after a stop."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from megarl import platform

platform.current()  # prepares Megatron-Core before anything imports it

from megarl.config.schema_inputs import DataConfig  # noqa: E402
from megarl.data.sample import Prompt, Sample  # noqa: E402
from megarl.data.sampler import PromptSampler  # noqa: E402
from megarl.trainers.round_pairs import NoPair, imitation_pair, scored_pair  # noqa: E402
from tests.launch import torchrun  # noqa: E402
from tests.trainers.tiny_pairs import pairs as some_pairs  # noqa: E402
from tests.trainers.tiny_run import make_tiny_run, read_metrics  # noqa: E402

KEYS = DataConfig()
QUESTION = [{"role": "user", "content": "Say five"}]
LIMIT = 12


def answers(*given: tuple[str, float, str], failure: str | None = None) -> list[Sample]:
    """Of one prompt: (text, score, finish reason)."""
    prompt = Prompt(row=0, token_ids=[1], messages=QUESTION, data_source="sums")
    return [
        Sample(
            prompt=prompt,
            group=0,
            index=index,
            response_ids=[1, 2],
            response_mask=[1, 1],
            rollout_logprobs=[0.0, 0.0],
            finish_reason=reason,
            weight_version=0,
            response_text=text,
            rewards={"score": score},
            reward_failure=failure if index == 0 else None,
        )
        for index, (text, score, reason) in enumerate(given)
    ]


def test_the_best_and_the_worst_answer_are_a_pair_with_their_win_rates() -> None:
    samples = answers(("a", 0.5, "stop"), ("b", 2.0, "stop"), ("c", -1.0, "stop"))
    pair = scored_pair(samples, KEYS, hard=False)
    wins = lambda score: sum(1 / (1 + math.exp(other - score)) for other in (0.5, 2.0, -1.0)) / 3
    assert pair == {
        "prompt": QUESTION,
        "chosen": "b",
        "chosen_score": 2.0,
        "chosen_win_rate": pytest.approx(wins(2.0)),
        "rejected": "c",
        "rejected_score": -1.0,
        "rejected_win_rate": pytest.approx(wins(-1.0)),
    }
    hard = scored_pair(samples, KEYS, hard=True)
    assert (hard["chosen_win_rate"], hard["rejected_win_rate"]) == pytest.approx((2.5 / 3, 0.5 / 3))


def test_an_answer_that_was_cut_off_is_never_chosen_but_may_be_rejected() -> None:
    pair = scored_pair(answers(("a", 0.5, "stop"), ("b", 2.0, "length"), ("c", 0.0, "length")), KEYS, hard=True)
    assert (pair["chosen"], pair["rejected"]) == ("a", "c")
    with pytest.raises(NoPair, match="no answer that scores above another"):
        scored_pair(answers(("a", 0.5, "stop"), ("b", 2.0, "length")), KEYS, hard=True)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (answers(("a", 1.0, "stop"), ("b", 1.0, "stop")), "scores above another"),
        (answers(("a", 1.0, "length"), ("b", 0.0, "length")), "no answer with an end"),
        (answers((" ", 1.0, "stop"), ("", 0.0, "stop")), "no answer with an end"),
        (answers(("a", 1.0, "stop"), ("b", 0.0, "stop"), failure="timeout"), "scores above another"),
    ],
    ids=["equal scores", "none ends", "no text", "scoring failed"],
)
def test_answers_of_one_worth_are_no_pair(samples: list[Sample], words: str) -> None:
    with pytest.raises(NoPair, match=words):
        scored_pair(samples, KEYS, hard=False)


def test_spin_rejects_the_policys_answer() -> None:
    pair = imitation_pair(answers(("two", 0.0, "length")), "five", KEYS)
    assert pair == {"prompt": QUESTION, "chosen": "five", "rejected": "two"}
    for text, words in (("five", "the data's response"), ("  ", "without text")):
        with pytest.raises(NoPair, match=words):
            imitation_pair(answers((text, 0.0, "stop")), "five", KEYS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of SPPO and of SPIN on one rank, and one round of SPPO on two."""
    folder = tmp_path_factory.mktemp("rounds")
    demonstrations = [{"prompt": each["prompt"], "response": each["chosen"]} for each in some_pairs(8, 0)]
    pq.write_table(pa.Table.from_pylist(demonstrations), folder / "demonstrations.parquet")
    config = make_tiny_run(
        folder,
        prompts=64,
        data={"val_files": [], "max_prompt_length": 100, "max_response_length": LIMIT},
        actor={"max_tokens_per_micro_batch": 512},
        rollout={"n": 8, "max_num_seqs": 128},
        preference={"loss_type": "sppo", "beta": 0.05, "rounds": 2},
        trainer={"kind": "preference", "total_training_steps": 2, "save_freq": 1, "val_before_train": False},
    )
    # Greedy, so that another program can repeat it.
    spin = ["preference.loss_type=spin", f"data.train_files={folder / 'demonstrations.parquet'}", "rollout.top_k=1"]
    program = "tests/trainers/train_in_layouts.py"
    torchrun(1, program, config, folder, json.dumps({"sppo": [], "spin": spin}), timeout=280)
    torchrun(2, program, config, folder, json.dumps({"TP2": ["preference.rounds=1", TP]}), timeout=280)
    again = folder / "again"
    shutil.copytree(folder / "sppo", again, symlinks=True)
    _undo_the_last_step(again)
    (again / "hf").unlink()
    damaged = folder / "damaged"
    shutil.copytree(again, damaged)
    pairs = damaged / "round-2" / "pairs.parquet"
    pairs.write_bytes(pairs.read_bytes()[:-20])
    shutil.copytree(folder / "sppo", folder / "finished", symlinks=True)
    (folder / "finished" / "hf").unlink()
    torchrun(1, program, config, folder, json.dumps({"again": [], "damaged": [], "finished": []}), timeout=280)
    return folder


TP = "parallel.tensor_model_parallel_size=2"


def _undo_the_last_step(run: Path) -> None:
    """As if the run had been stopped in the middle of its second round."""
    last = run / "round-2"
    shutil.rmtree(last / "checkpoints" / "step-000002")
    shutil.rmtree(last / "hf")
    state = json.loads((last / "round.json").read_text())
    assert state["over"]
    (last / "round.json").write_text(json.dumps({**state, "over": False}))


def pairs_of(run: Path, number: int) -> list[dict[str, Any]]:
    return pq.read_table(run / f"round-{number}" / "pairs.parquet").to_pylist()


@pytest.mark.parametrize("run", ["sppo", "spin"])
def test_each_round_has_a_reference_and_pairs_of_its_own(folder: Path, run: str) -> None:
    assert pairs_of(folder / run, 1) != pairs_of(folder / run, 2)
    for number in (1, 2):
        first = read_metrics(folder / run / f"round-{number}")[0]
        assert first["train/rewards/chosen"] == pytest.approx(0, abs=1e-4)
        assert first["train/rewards/rejected"] == pytest.approx(0, abs=1e-4)
        second = read_metrics(folder / run / f"round-{number}")[1]
        assert abs(second["train/rewards/margins"]) > 1e-3


def test_the_first_sppo_loss_is_that_of_the_win_rates(folder: Path) -> None:
    """Policy and reference are one: what is left is ((p_w - 1/2)/beta)^2 + ((p_l - 1/2)/beta)^2."""
    rows = pairs_of(folder / "sppo", 1)
    assert all(row["chosen_win_rate"] > row["rejected_win_rate"] for row in rows)
    losses = [sum(((row[f"{side}_win_rate"] - 0.5) / 0.05) ** 2 for side in ("chosen", "rejected")) for row in rows]
    batch = PromptSampler(len(rows), 4, shuffle=True, seed=1).next_batch()
    found = read_metrics(folder / "sppo" / "round-1")[0]["train/loss"]
    assert found == pytest.approx(sum(losses[row] for row in batch) / 4, rel=1e-3)


def test_spin_rejects_the_greedy_answers_of_the_round_before_in_transformers(folder: Path) -> None:
    model_folder = folder / "spin" / "round-1" / "hf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    rows = pairs_of(folder / "spin", 2)
    assert [row["chosen"] for row in rows] == [each["chosen"] for each in some_pairs(8, 0)]
    for row in rows:
        ids = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        whole = model.generate(ids, do_sample=False, max_new_tokens=LIMIT, eos_token_id=tokenizer.eos_token_id)
        assert row["rejected"] == tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_layout_does_not_change_the_pairs(folder: Path) -> None:
    assert pairs_of(folder / "TP2", 1) == pairs_of(folder / "sppo", 1)


@pytest.mark.parametrize("run", ["again", "damaged"])
def test_a_run_that_was_stopped_in_a_round_ends_with_the_same_weights(folder: Path, run: str) -> None:
    """Pairs that cannot be read are drawn again, by the same seeds from the same weights."""
    assert pairs_of(folder / run, 2) == pairs_of(folder / "sppo", 2)
    found, expected = ((folder / each / "hf" / "model.safetensors").read_bytes() for each in (run, "sppo"))
    assert found == expected


def test_a_round_that_is_over_is_not_trained_again(folder: Path) -> None:
    """`metrics.jsonl` of a run that trains again is written anew."""
    for number in (1, 2):
        found, expected = (folder / run / f"round-{number}" for run in ("finished", "sppo"))
        assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in expected.iterdir())
        assert (found / "metrics.jsonl").stat().st_mtime == (expected / "metrics.jsonl").stat().st_mtime
    assert (folder / "finished" / "hf").resolve() == (folder / "finished" / "round-2" / "hf").resolve()


def test_the_run_ends_with_the_model_of_its_last_round(folder: Path) -> None:
    assert (folder / "sppo" / "hf").resolve() == (folder / "sppo" / "round-2" / "hf").resolve()
