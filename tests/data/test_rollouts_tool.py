"""Dumped rollouts become a dataset of responses that gives the same samples again."""

import dataclasses
import math
import random

import pyarrow.parquet as pq
import pytest

from megarl.config import RunConfig
from megarl.data.chat import load_chat_tokenizer
from megarl.data.responses import UNKNOWN_WEIGHTS, OfflineResponses
from megarl.data.sample import Prompt, Sample
from megarl.trainers.dump import RolloutDump, RolloutReplay
from tests.data.chat_models import make_chat_model
from tests.data.test_tools import refused, rows_of, run

GROUPS, N, RANKS = 6, 4, 2
QUESTION = "What is two plus three?\u2028Think,\x85and answer."


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return load_chat_tokenizer(make_chat_model(tmp_path_factory.mktemp("model")))


def make_samples(chat, step):
    """Random token ids, scores and log-probs of full float precision, some responses cut off."""
    generator = random.Random(step)
    samples = []
    for group in range(GROUPS):
        messages = [{"role": "user", "content": f"{QUESTION} {group}"}]
        prompt = Prompt(
            row=100 * step + group,
            token_ids=chat.encode([chat.render(messages, generation_prompt=True)])[0],
            messages=messages,
            data_source="sums",
            reward_model={"style": "rule", "ground_truth": "5"},
            extra_info={"index": group},
        )
        for index in range(N):
            is_ended = generator.random() < 0.7
            ids = [generator.randrange(5, 300) for _ in range(generator.randrange(1, 8))]
            ids += list(chat.end_token_ids[:1]) if is_ended else []
            samples.append(
                Sample(
                    prompt=prompt,
                    group=group,
                    index=index,
                    response_ids=ids,
                    response_mask=[1] * len(ids),
                    rollout_logprobs=[-generator.expovariate(1) for _ in ids],
                    finish_reason="stop" if is_ended else "length",
                    weight_version=step - 1,
                    response_text=chat.decode(ids),
                    rewards={"score": generator.random(), "brevity": 0.5},
                )
            )
    return samples


def dump(folder, samples_of_step):
    for rank in range(RANKS):
        writer = RolloutDump(folder, rank, RANKS)
        for step, samples in samples_of_step.items():
            writer.write(step, [sample for sample in samples if sample.group % RANKS == rank])
    return folder


@pytest.fixture
def samples_of_step(chat):
    return {step: make_samples(chat, step) for step in (1, 2, 12)}


@pytest.fixture
def rollouts(tmp_path, samples_of_step):
    return dump(tmp_path / "rollouts", samples_of_step)


def convert(rollouts, out, *options):
    return rows_of("rollouts", "--rollouts", rollouts, "--out", out, *options, out=out)


def test_the_dataset_gives_the_samples_that_the_replay_gives(chat, rollouts, samples_of_step, tmp_path):
    out = tmp_path / "out.parquet"
    convert(rollouts, out, "--steps", "1:2")
    config = RunConfig()
    config.data.train_files, config.data.train_batch_size, config.data.shuffle = [str(out)], GROUPS, False
    config.rollout.engine, config.rollout.n = "dataset", N
    offline, replay = OfflineResponses(config, chat), RolloutReplay(rollouts, N)
    assert offline.has_rewards and offline.has_logprobs and len(offline) == 2 * GROUPS
    for step in (1, 2):
        first = (step - 1) * GROUPS
        found = offline.samples(list(enumerate(offline.prompts(range(first, first + GROUPS)))), step)
        replayed = replay.read(step, range(GROUPS))
        assert replayed == samples_of_step[step]
        assert len(found) == len(replayed) == GROUPS * N
        for sample, expected in zip(found, replayed, strict=True):
            # What the dataset does not keep: which row of which data, which weights, and rewards by other names.
            expected.prompt = dataclasses.replace(expected.prompt, row=sample.prompt.row)
            expected.weight_version = UNKNOWN_WEIGHTS
            expected.rewards = {"score": expected.rewards["score"]}
            assert sample == expected


def test_rows_are_in_the_order_of_steps_and_groups_and_say_their_step(rollouts, samples_of_step, tmp_path):
    rows = convert(rollouts, tmp_path / "out.parquet")
    assert [row["rollout_step"] for row in rows] == [1] * GROUPS + [2] * GROUPS + [12] * GROUPS
    assert [row["extra_info"]["index"] for row in rows] == list(range(GROUPS)) * 3
    assert rows[-1]["responses"] == [sample.response_ids for sample in samples_of_step[12][-N:]]


STEPS = {"2": [2], "2:": [2, 12], ":2": [1, 2], "1:11": [1, 2], ":": [1, 2, 12]}


@pytest.mark.parametrize(("wanted", "steps"), STEPS.items(), ids=STEPS.keys())
def test_steps_are_chosen_by_a_range(wanted, steps, rollouts, tmp_path):
    rows = convert(rollouts, tmp_path / "out.parquet", "--steps", wanted)
    assert sorted({row["rollout_step"] for row in rows}) == steps


def test_low_scores_and_then_prompts_with_few_responses_are_left_out_and_counted(rollouts, samples_of_step, tmp_path):
    out = tmp_path / "out.parquet"
    result = run(
        *(
            "rollouts",
            "--rollouts",
            rollouts,
            "--out",
            out,
            "--steps",
            "1",
            "--min-score",
            "0.5",
            "--min-responses",
            "3",
        )
    )
    assert result.returncode == 0, result.stderr
    groups = {group: [] for group in range(GROUPS)}
    for sample in samples_of_step[1]:
        if sample.rewards["score"] >= 0.5:
            groups[sample.group].append(sample)
    enough = [group for group in groups.values() if len(group) >= 3]
    good, used = sum(map(len, groups.values())), sum(map(len, enough))
    assert 0 < used < good < GROUPS * N, "the test should leave out some of each kind"
    rows = pq.read_table(out).to_pylist()
    assert [row["responses"] for row in rows] == [[sample.response_ids for sample in group] for group in enough]
    assert [row["response_rewards"] for row in rows] == [[s.rewards["score"] for s in group] for group in enough]
    assert f"{GROUPS * N} responses; {GROUPS * N - good} left out by their score" in result.stdout
    assert f"{good - used} left out with their prompt, which has too few" in result.stdout


def test_aborted_responses_are_left_out(chat, tmp_path):
    samples = make_samples(chat, 1)
    samples[0].finish_reason = "abort"
    rows = convert(dump(tmp_path / "rollouts", {1: samples}), tmp_path / "out.parquet")
    assert [len(row["responses"]) for row in rows] == [N - 1] + [N] * (GROUPS - 1)
    assert rows[0]["responses"] == [sample.response_ids for sample in samples[1:N]]


def test_log_probs_that_a_run_did_not_have_are_no_column(chat, tmp_path):
    samples = make_samples(chat, 1)
    for sample in samples:
        sample.rollout_logprobs = [math.nan] * len(sample.response_ids)
    rows = convert(dump(tmp_path / "rollouts", {1: samples}), tmp_path / "out.parquet")
    assert "response_logprobs" not in rows[0] and "response_rewards" in rows[0]
    mixed = dump(tmp_path / "mixed", {1: samples, 2: make_samples(chat, 2)})
    problem = refused("rollouts", "--rollouts", mixed, "--out", tmp_path / "mixed.parquet")
    assert "some responses have log-probs and others do not" in problem


def test_prompts_without_ground_truth_can_be_written(chat, tmp_path):
    samples = make_samples(chat, 1)
    for sample in samples:
        sample.prompt = dataclasses.replace(sample.prompt, reward_model={}, extra_info={})
    rows = convert(dump(tmp_path / "rollouts", {1: samples}), tmp_path / "out.parquet")
    assert rows[0].keys() == {
        *("data_source", "prompt", "rollout_step", "responses", "response_rewards", "response_logprobs")
    }


def test_long_responses_make_small_row_groups(chat, tmp_path):
    samples = [sample for sample in make_samples(chat, 1) if sample.group < 2]
    for sample in samples:
        length = 200_000
        sample.response_ids, sample.response_mask = [7] * length, [1] * length
        sample.rollout_logprobs = [-0.5] * length
    out = tmp_path / "out.parquet"
    convert(dump(tmp_path / "rollouts", {1: samples}), out)
    # 4 responses × 200,000 tokens × 12 bytes are 9.6 MB a row; two would be above 16 MiB
    assert pq.ParquetFile(out).metadata.num_row_groups == 2


def test_bad_input_is_one_sentence(chat, rollouts, tmp_path):
    out = tmp_path / "out.parquet"
    nowhere = refused("rollouts", "--rollouts", tmp_path / "nowhere", "--out", out)
    assert "--rollouts" in nowhere and "trainer.rollout_data_dir" in nowhere
    for wanted, words in (("a:b", "not a range"), ("3:11", "steps from 1 to 12"), ("", "not a range")):
        assert words in refused("rollouts", "--rollouts", rollouts, "--out", out, "--steps", wanted)
    nothing = refused("rollouts", "--rollouts", rollouts, "--out", out, "--min-score", "2")
    assert "no prompt is left" in nothing and "--min-score" in nothing
    samples = make_samples(chat, 1)
    samples[3].response_mask[0] = 0
    of_tools = dump(tmp_path / "tools", {1: samples})
    assert "step 1: a response to row 100 has tokens that the model did not choose" in refused(
        "rollouts", "--rollouts", of_tools, "--out", out
    )
    (rollouts / "step-000002" / "rank-00001.jsonl").write_text("{}\n")
    assert "rank-00001.jsonl, line 1 is not a sample" in refused("rollouts", "--rollouts", rollouts, "--out", out)
    assert not out.exists()
