"""Scoring in worker processes: order, results, and every way in which a config can be wrong."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.schema import CustomRewardConfig, RewardConfig
from megarl.rewards.manager import RewardManager, RewardSource
from tests.rewards.samples import custom_manager, sample, score_all


def _refusal(path: Path, name: str = "compute_score") -> str:
    """The one sentence with which a reward function is refused."""
    config = RewardConfig(custom=CustomRewardConfig(path=str(path), name=name))
    with pytest.raises(ConfigError) as caught:
        RewardManager(config, [])
    (problem,) = caught.value.problems
    assert "Traceback" not in problem and "\n" not in problem
    return problem


def _file(folder: Path, source: str) -> Path:
    path = folder / "my_reward.py"
    path.write_text(source)
    return path


def test_each_sample_is_graded_by_its_own_rule() -> None:
    samples = [
        sample("#### 1,000", "1000", data_source="openai/gsm8k"),
        sample("It is 1000", "1000", data_source="openai/gsm8k"),
        sample("It is 1000", "1000", data_source="openai/gsm8k", style="gsm8k_flexible"),
        sample(r"\boxed{\frac{2}{4}}", "0.5", data_source="my/problems", style="math"),
        sample("Paris", "Paris", data_source="exact_match"),
    ]
    sources = {RewardSource.of(each.prompt) for each in samples}
    with RewardManager(RewardConfig(), sources) as manager:
        assert score_all(manager, samples) == [1, 0, 1, 1, 1]
        assert [each.reward_failure for each in samples] == [None] * 5
        with pytest.raises(ConfigError, match=r"data_source 'other' and reward_model.style 'rule' have no grader"):
            manager.submit(sample("", data_source="other"))


def test_rows_without_a_grader_are_all_named_before_anything_starts() -> None:
    sources = [RewardSource("my/data", "rule"), RewardSource("openai/gsm8k", "model"), RewardSource("openai/gsm8k", "")]
    with pytest.raises(ConfigError) as caught:
        RewardManager(RewardConfig(), sources)
    first, second = caught.value.problems
    assert first.startswith("rows with data_source 'my/data' and reward_model.style 'rule' have no grader: known")
    assert "openai/gsm8k, lighteval/MATH" in first and "gsm8k_flexible" in first and "reward.custom.path" in first
    assert second.startswith("rows with data_source 'openai/gsm8k' and reward_model.style 'model'")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rewards.manager.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"graded by math need the package math_verify.*pip install math-verify"):
        RewardManager(RewardConfig(), [RewardSource("lighteval/MATH", "rule")])


def test_results_come_in_the_order_of_submission_though_they_finish_in_another(tmp_path: Path) -> None:
    source = """
        import time
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            time.sleep(extra_info["seconds"])
            return float(solution_str)
    """
    with custom_manager(tmp_path, source, num_workers=3) as manager:
        for _ in range(2):
            samples = [sample(str(n), extra_info={"seconds": 0.05 * (n % 3 == 0)}) for n in range(30)]
            assert score_all(manager, samples) == list(range(30))
            assert manager.metrics()["reward/scored"] == 30 and manager.metrics()["reward/failed"] == 0
        assert score_all(manager, []) == [] and manager.metrics()["reward/scored"] == 0


def test_a_function_gets_verls_arguments_and_its_numbers_are_kept(tmp_path: Path) -> None:
    source = """
        import numpy as np
        from my_helper import double
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            assert data_source == "test" and ground_truth == ["a", "b"] and extra_info == {"index": 7}
            return {"score": np.float32(double(0.25)), "acc": True, "length": 3, "pred": "text", "x": None}
    """
    (tmp_path / "my_helper.py").write_text("def double(x): return 2 * x\n")
    with custom_manager(tmp_path, source) as manager:
        scored = sample("abc", ["a", "b"], extra_info={"index": 7})
        assert score_all(manager, [scored]) == [0.5]
        assert scored.rewards == {"score": 0.5, "acc": 1.0, "length": 3.0}


@pytest.mark.parametrize("returned", ["1", "0.25", "True", "np.float64(2)", "np.int64(3)", "Decimal('0.5')"])
def test_numbers_of_any_kind_are_scores(tmp_path: Path, returned: str) -> None:
    source = f"""
        import numpy as np
        from decimal import Decimal
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return {returned}
    """
    expected = {"1": 1, "0.25": 0.25, "True": 1, "np.float64(2)": 2, "np.int64(3)": 3, "Decimal('0.5')": 0.5}
    with custom_manager(tmp_path, source, num_workers=1) as manager:
        assert score_all(manager, [sample("")]) == [expected[returned]]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert re.match(r"reward\.custom\.path .*nothing\.py is not a file \(looked", _refusal(tmp_path / "nothing.py"))


def test_a_missing_function_is_answered_with_those_there_are(tmp_path: Path) -> None:
    path = _file(tmp_path, "def compute_scores(data_source, solution_str, ground_truth): return 1\n")
    problem = _refusal(path)
    assert problem.endswith("has no function 'compute_score' (reward.custom.name): did you mean 'compute_scores'?")
    assert _refusal(path, "grade").endswith("its functions are: compute_scores.")
    assert _refusal(_file(tmp_path, "compute_score = 3\n")).endswith("its functions are: none.")


@pytest.mark.parametrize(
    "signature",
    [
        "data_source, solution_str, ground_truth",
        "solution, answer",
        "data_source, solution_str, *rest",
        "",
        "a, **rest",
    ],
)
def test_a_wrong_signature_is_named(tmp_path: Path, signature: str) -> None:
    problem = _refusal(_file(tmp_path, f"def compute_score({signature}): return 1\n"))
    assert (
        f"compute_score({signature})" in problem and "define it as compute_score(data_source, solution_str" in problem
    )


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\ny = x +\n", "line 2: SyntaxError: invalid syntax"),
        ("import nothing_of_this_name\n", "line 1: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def f():\n    return 1 / 0\n\nf()\n", "line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_line(tmp_path: Path, source: str, complaint: str) -> None:
    assert _refusal(_file(tmp_path, source)).endswith(f"my_reward.py cannot be imported: {complaint}.")


def test_a_relative_path_starts_at_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _file(tmp_path, "\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert _refusal(Path("my_reward.py")) == (
        "reward.custom.path my_reward.py cannot be imported: line 2: ZeroDivisionError: division by zero."
    )


def test_the_example_of_the_guide_works(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    example = guide.split("```python\n")[1].split("```")[0]
    assert "compute_score" in example
    with custom_manager(tmp_path, example) as manager:
        assert score_all(manager, [sample("Answer: 42"), sample("Answer: 41 "), sample("42")]) == [1.0, 0.5, 0.0]


def test_a_file_that_ends_its_process_is_refused(tmp_path: Path) -> None:
    problem = _refusal(_file(tmp_path, "import os\nos._exit(9)\n"))
    assert problem == "a reward worker could not start: the reward worker ended with exit status 9."


def test_a_callable_object_and_extra_arguments_with_defaults_are_accepted(tmp_path: Path) -> None:
    source = """
        class Grader:
            def __call__(self, data_source, solution_str, ground_truth, extra_info, weight=2.0, **rest):
                return weight
        compute_score = Grader()
    """
    with custom_manager(tmp_path, source, num_workers=1) as manager:
        assert score_all(manager, [sample("")]) == [2.0]


def test_workers_do_not_import_torch(tmp_path: Path) -> None:
    source = """
        import sys
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return float(not {"torch", "transformers", "omegaconf", "megatron"} & set(sys.modules))
    """
    with custom_manager(tmp_path, source, num_workers=1) as manager:
        assert score_all(manager, [sample("")]) == [1.0]


def test_what_a_function_prints_disturbs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = """
        import os, sys
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            print("x" * 100_000)
            os.write(1, b"raw")
            sys.stdin.read()
            return 1.0
    """
    with caplog.at_level(logging.WARNING), custom_manager(tmp_path, source) as manager:
        assert score_all(manager, [sample("y" * 1_000_000) for _ in range(4)]) == [1.0] * 4
    assert not caplog.records
