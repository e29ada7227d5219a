"""Graders, compared with answers that a person can check."""

from __future__ import annotations

import json

import pytest
import reasoning_gym

from megarl.rewards.graders import GRADERS, grader_of
from megarl.rewards.graders.answers import boxed_answer, tagged_answer


def _grade(name: str, response: str, ground_truth: object, extra_info: dict | None = None) -> object:
    return GRADERS[name].load()(
        data_source="test", solution_str=response, ground_truth=ground_truth, extra_info=extra_info
    )


@pytest.mark.parametrize(
    ("response", "ground_truth", "strict", "flexible"),
    [
        ("She has 6 * 3 = 18 left.\n#### 18", "18", 1, 1),
        ("#### 18 dollars", "18", 1, 1),
        ("####18", "18", 1, 1),
        ("#### $1,234.50", "1234.5", 1, 1),
        ("#### 1000", "1,000", 1, 1),
        ("#### 18.", "18", 1, 1),
        ("#### 18.00", "18", 1, 1),
        ("#### -5", "-5", 1, 1),
        ("#### -$5", "-5", 1, 1),
        ("#### .5", "0.5", 1, 1),
        ("#### 180", "18", 0, 0),
        ("#### 17\nNo: #### 18", "18", 1, 1),
        ("#### 18\nNo: #### 17", "18", 0, 0),
        ("The answer is 18", "18", 0, 1),
        ("So 20-2=18", "18", 0, 1),
        ("20-18", "18", 0, 1),
        ("#### 18\nI counted 3 eggs.", "18", 1, 0),
        ("####\n18", "18", 0, 1),
        ("#### eighteen", "18", 0, 0),
        ("#### ,", "18", 0, 0),
        ("", "18", 0, 0),
        ("x18", "18", 0, 1),
    ],
)
def test_gsm8k(response: str, ground_truth: str, strict: float, flexible: float) -> None:
    assert _grade("gsm8k", response, ground_truth) == strict
    assert _grade("gsm8k_flexible", response, ground_truth) == flexible


@pytest.mark.parametrize("ground_truth", ["eighteen", "", None, "Janet sells 9 eggs.\n#### 18"])
def test_a_gsm8k_ground_truth_that_is_no_number_is_an_error(ground_truth: object) -> None:
    with pytest.raises(ValueError, match="the ground_truth of a GSM8K row is a number"):
        _grade("gsm8k", "#### 18", ground_truth)


@pytest.mark.parametrize(
    ("ground_truth", "right", "wrong"),
    [
        (r"\frac{1}{2}", r"So it is $\boxed{0.5}$.", r"\boxed{0.25}"),
        (r"\frac12", "The answer is 1/2", "The answer is 2"),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", r"\boxed{\sqrt{13}}"),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", r"\boxed{(x-1)^2}"),
        ("(1,2)", r"\boxed{(1, 2)}", r"\boxed{(2, 1)}"),
        (r"\{1,2\}", r"\boxed{\{2, 1\}}", r"\boxed{\{2, 3\}}"),
        ("[0,1)", r"\boxed{[0, 1)}", r"\boxed{[0, 1]}"),
        (r"90^\circ", r"\boxed{90}", r"\boxed{9}"),
        (r"\text{Friday}", r"\boxed{\text{Friday}}", r"\boxed{\text{Monday}}"),
        ("10", "18 - 8 = 10", "I do not know."),
        (r"\boxed{7}", "The answer is $7$.", r"\boxed{}"),
        ("3", r"First \boxed{4}, no: \boxed{3}", r"First \boxed{3}, no: \boxed{4}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\boxed{1, 2}"),
    ],
)
def test_mathematics(ground_truth: str, right: str, wrong: str) -> None:
    assert _grade("math", right, ground_truth) == 1
    assert _grade("math", wrong, ground_truth) == 0


def test_a_ground_truth_that_is_no_mathematics_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        _grade("math", r"\boxed{1}", "")


@pytest.mark.parametrize("task", ["chain_sum", "simple_equations", "spell_backward", "letter_counting"])
@pytest.mark.parametrize("as_json", [True, False])
def test_generated_tasks_are_graded_by_their_own_verifier(task: str, as_json: bool) -> None:
    for entry in reasoning_gym.create_dataset(task, size=3, seed=1):
        extra_info = {"entry": json.dumps(entry) if as_json else entry}
        grade = lambda response: _grade("reasoning_gym", response, entry["answer"], extra_info)  # noqa: B023
        assert grade(entry["answer"]) == {"score": 1.0, "acc": 1.0}
        assert grade(f"Not <answer>0</answer> but <answer> {entry['answer']} </answer>.") == {"score": 1.0, "acc": 1.0}
        wrong = grade("<answer>no idea</answer>")
        assert isinstance(wrong, dict) and wrong["score"] < 1 and wrong["acc"] == 0


def test_a_generated_row_without_its_task_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"needs the generated task in extra_info\.entry"):
        _grade("reasoning_gym", "1", "1", {"index": 3})


def test_exact_match() -> None:
    assert _grade("exact_match", " Paris\n", "Paris") == 1
    assert _grade("exact_match", "I think <answer>Paris</answer>", ["Paris", "paris"]) == 1
    assert _grade("exact_match", "paris", "Paris") == 0
    assert _grade("exact_match", "It is Paris", "Paris") == 0
    with pytest.raises(ValueError, match="needs a ground_truth"):
        _grade("exact_match", "", None)


def test_where_an_answer_stands() -> None:
    assert tagged_answer("<answer>a</answer> <answer>\nb\n</answer> c") == "b"
    assert tagged_answer(" <answer>open ") == "<answer>open"
    assert boxed_answer(r"\boxed{1} and \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert boxed_answer(r"\boxed{1} and \boxed{2") == "1"
    assert boxed_answer("nothing {here}") is None


@pytest.mark.parametrize(
    ("data_source", "style", "grader"),
    [
        ("openai/gsm8k", "rule", "gsm8k"),
        ("openai/gsm8k", "gsm8k_flexible", "gsm8k_flexible"),
        ("HuggingFaceH4/MATH-500", None, "math"),
        ("reasoning_gym/chain_sum", "rule", "reasoning_gym"),
        ("exact_match", "rule", "exact_match"),
        ("my/data", "math", "math"),
        ("my/data", "rule", None),
        ("openai/gsm8k", "model", None),
    ],
)
def test_style_chooses_the_grader_and_else_the_data_source(data_source: str, style: str, grader: str | None) -> None:
    assert grader_of(data_source, style) == grader
