"""The dataset tools write files that the datasets read, the same for the same seed, and never half of one."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megarl.config.schema_inputs import DataConfig
from megarl.data.chat import load_chat_tokenizer
from megarl.data.prompts import PromptDataset
from tests.data.chat_models import make_chat_model
from tests.launch import LIMIT_S

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "data"

GSM8K = [
    {"question": "Two plus three?", "answer": "2+3=<<2+3=5>>5\n#### 5"},
    {"question": "A thousand and one {twice}?", "answer": "It is 2,002.\n#### 2,002"},
    {"question": "Three less than two?", "answer": "#### -1"},
]


def run(tool, *arguments, **options):
    command = [sys.executable, str(TOOLS / f"{tool}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, **options)


def refused(*arguments, **options):
    """The one sentence of a tool that refuses."""
    result = run(*arguments, **options)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1
    return result.stderr


def rows_of(*arguments, out):
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    assert f"rows to {out}" in result.stdout
    return pq.read_table(out).to_pylist()


@pytest.fixture
def gsm8k(tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    for split, entries in (("train", GSM8K), ("test", GSM8K[:1])):
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_gsm8k_has_verls_columns_and_the_number_as_ground_truth(gsm8k, tmp_path):
    rows = rows_of("gsm8k", "--input", gsm8k, "--out", tmp_path / "out", out=tmp_path / "out" / "train.parquet")
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert [row["prompt"] for row in rows] == [
        [{"role": "user", "content": f"{entry['question']} {instruction}"}] for entry in GSM8K
    ]
    assert [row["reward_model"] for row in rows] == [
        {"style": "rule", "ground_truth": truth} for truth in ("5", "2002", "-1")
    ]
    assert rows[1]["data_source"] == "openai/gsm8k"
    assert rows[1]["extra_info"] == {"split": "train", "index": 1, **GSM8K[1]}
    assert pq.read_table(tmp_path / "out" / "test.parquet").num_rows == 1


def test_gsm8k_takes_single_files_another_template_and_a_system_message(gsm8k, tmp_path):
    options = [
        "--input",
        gsm8k / "test.jsonl",
        "--out",
        tmp_path,
        "--template",
        "Q: {question}",
        "--system",
        "Be brief.",
    ]
    rows = rows_of("gsm8k", *options, out=tmp_path / "test.parquet")
    assert rows[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: Two plus three?"},
    ]
    assert not (tmp_path / "train.parquet").exists()


def test_bad_gsm8k_input_is_named(gsm8k, tmp_path):
    out = ["--out", tmp_path / "out"]
    assert "nowhere" in refused("gsm8k", "--input", "nowhere", *out)
    assert "train.jsonl or test.jsonl" in refused("gsm8k", "--input", tmp_path, *out)
    assert "{question}" in refused("gsm8k", "--input", gsm8k, "--template", "What?", *out)
    for bad in ('{"question": "x", "answer": "no mark"}', "no JSON"):
        (gsm8k / "train.jsonl").write_text(json.dumps(GSM8K[0]) + "\n" + bad, encoding="utf-8")
        assert "train.jsonl, line 2 is not a GSM8K entry" in refused("gsm8k", "--input", gsm8k, *out)
    (gsm8k / "train.jsonl").write_text("", encoding="utf-8")
    assert "no rows" in refused("gsm8k", "--input", gsm8k, *out)
    assert not (tmp_path / "out" / "train.parquet").exists()


def test_sums_are_right_and_training_and_held_out_questions_differ(tmp_path):
    train, test = tmp_path / "train.parquet", tmp_path / "test.parquet"
    options = [
        "--terms",
        3,
        "--operators",
        "+-",
        "--size",
        300,
        "--held-out-size",
        40,
        "--out",
        train,
        "--held-out",
        test,
    ]
    rows = rows_of("arithmetic", *options, out=train)
    held_out = pq.read_table(test).to_pylist()
    assert (len(rows), len(held_out)) == (300, 40)
    questions = [row["prompt"][0]["content"] for row in rows + held_out]
    assert len(set(questions)) == 340
    for question, row in zip(questions, rows + held_out, strict=True):
        assert re.fullmatch(r"\d [+-] \d [+-] \d =", question)
        assert row["reward_model"] == {"style": "exact_match", "ground_truth": str(eval(question.rstrip("= ")))}


def test_digits_to_sort_and_their_demonstrations_have_the_same_questions(tmp_path):
    train, test = tmp_path / "train.parquet", tmp_path / "test.parquet"
    files = ["--digits", 4, "--size", 1000, "--held-out-size", 100, "--seed", 5, "--out", train, "--held-out", test]
    rows = rows_of("sorting", *files, out=train)
    held_out = pq.read_table(test).to_pylist()
    truths = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in rows}
    assert all(truth == "".join(sorted(question)) for question, truth in truths.items())
    assert len(truths) == 1000 and truths.keys().isdisjoint(row["prompt"][0]["content"] for row in held_out)

    demonstrations = rows_of("sorting", *files, "--demonstrations", "--wrong-share", 0.7, out=train)
    answers = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in demonstrations}
    assert list(answers) == list(truths)
    right = {question for question in answers if answers[question] == truths[question]}
    assert all(answers[question] == truths[question][::-1] for question in answers if question not in right)
    assert len(right) / 1000 == pytest.approx(0.3, abs=0.06)  # four standard deviations


def test_pairs_prefer_the_right_order_to_every_kind_of_wrong_answer(tmp_path):
    out = tmp_path / "a.parquet"
    rows = rows_of("sorting", "--size", 600, "--seed", 5, "--out", out, "--pairs", out=out)
    kinds = {"descending": 0, "another order": 0, "another digit": 0}
    for row in rows:
        digits, rejected = row["prompt"][0]["content"], row["rejected"]
        assert row["chosen"] == "".join(sorted(digits)) != rejected
        same_digits = sorted(rejected) == sorted(digits)
        kind = (
            ("descending" if rejected == row["chosen"][::-1] else "another order") if same_digits else "another digit"
        )
        kinds[kind] += 1
    assert all(count > 120 for count in kinds.values()), kinds
    questions = [
        row["prompt"][0]["content"] for row in rows_of("sorting", "--size", 600, "--seed", 5, "--out", out, out=out)
    ]
    assert questions == [row["prompt"][0]["content"] for row in rows]


def test_the_same_seed_writes_the_same_file_over_an_old_one(tmp_path):
    contents = []
    for seed in (1, 1, 2):
        rows_of("arithmetic", "--size", 20, "--seed", seed, "--out", tmp_path / "a.parquet", out=tmp_path / "a.parquet")
        contents.append((tmp_path / "a.parquet").read_bytes())
    assert contents[0] == contents[1] != contents[2]
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_all_questions_of_a_small_task_can_be_had_and_not_one_more(tmp_path):
    out = tmp_path / "a.parquet"
    assert len(rows_of("arithmetic", "--size", 100, "--out", out, out=out)) == 100
    assert "about 100" in refused("arithmetic", "--size", 101, "--out", out)
    assert pq.read_table(out).num_rows == 100, "a refused call leaves the old file"


def test_options_that_make_no_sense_are_refused(tmp_path):
    out = ["--out", tmp_path / "a.parquet"]
    assert "--size is 0" in refused("arithmetic", "--size", 0, *out)
    assert "at least 2 terms" in refused("arithmetic", "--size", 1, "--operators", "*", *out)
    assert "belong together" in refused("arithmetic", "--size", 1, "--held-out-size", 1, *out)
    assert "at least 2 digits" in refused("sorting", "--size", 1, "--digits", 1, *out)
    assert "from 0 to 1" in refused("sorting", "--size", 1, "--wrong-share", 1.5, *out)
    both = [*out, "--held-out", tmp_path / "a.parquet", "--held-out-size", 1]
    assert "name two files" in refused("arithmetic", "--size", 1, *both)


def test_a_full_disk_leaves_neither_a_part_nor_a_damaged_file(tmp_path):
    out = tmp_path / "a.parquet"
    rows_of("arithmetic", "--size", 10, "--out", out, out=out)
    old = out.read_bytes()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    message = refused("arithmetic", "--size", 5000, "--digits", 4, "--out", out, preexec_fn=limit)
    assert f"{out} cannot be written" in message
    assert out.read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


CHAIN_SUM = ["reasoning_gym", "--task", "chain_sum", "--param", "max_terms=2", "--param", "max_digits=1"]


def test_a_reasoning_gym_task_can_be_scored_by_the_packages_verifier(tmp_path):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    train, test = tmp_path / "train.parquet", tmp_path / "test.parquet"
    files = ["--size", 152, "--held-out-size", 48, "--out", train, "--held-out", test]
    rows = rows_of(*CHAIN_SUM, *files, "--template", "{question} ?", out=train)
    verify = reasoning_gym.get_score_answer_fn("chain_sum")
    questions = set()
    for row in [*rows, *pq.read_table(test).to_pylist()]:
        entry = json.loads(row["extra_info"]["entry"])
        truth = row["reward_model"]["ground_truth"]
        first, sign, second = re.search(r"(\d) ([+-]) (\d) =$", entry["question"]).groups()
        assert truth == str(int(first) + int(second) * (1 if sign == "+" else -1))
        assert verify(truth, entry) == 1.0 and verify("100", entry) < 1.0
        assert row["prompt"][0]["content"] == f"{entry['question']} ?"
        assert row["data_source"] == "reasoning_gym/chain_sum"
        questions.add(entry["question"])
    assert len(questions) == 200


def test_what_reasoning_gym_refuses_is_said_in_one_sentence(tmp_path):
    pytest.importorskip("reasoning_gym")
    rest = ["--size", 2, "--out", tmp_path / "a.parquet"]
    assert "did you mean chain_sum" in refused("reasoning_gym", "--task", "chain_sums", *rest)
    assert "max_terms must be >= min_terms" in refused(*CHAIN_SUM, "--param", "min_terms=9", *rest)
    assert "key=value" in refused(*CHAIN_SUM, "--param", "min_terms", *rest)
    assert "types that a dataset file does not keep" in refused("reasoning_gym", "--task", "rearc", *rest)


def test_the_files_are_prompts_to_the_dataset(gsm8k, tmp_path):
    out = tmp_path / "out"
    rows_of("gsm8k", "--input", gsm8k, "--out", out, out=out / "train.parquet")
    sums = tmp_path / "sums.parquet"
    rows_of("arithmetic", "--size", 5, "--out", sums, out=sums)
    chat = load_chat_tokenizer(make_chat_model(tmp_path / "model"))
    dataset = PromptDataset([str(out / "train.parquet"), str(sums)], chat, DataConfig())
    assert [prompt.data_source for prompt in dataset.prompts(range(8))] == ["openai/gsm8k"] * 3 + ["arithmetic"] * 5
