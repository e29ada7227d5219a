"""Estimators and losses from a person's own file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOptions, advantage_estimator
from megarl.algorithms.plugins import load_plugins
from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, policy_loss

KEY = "algorithm.plugins"

MINE = """
from megarl.algorithms.advantages import Advantages, advantage_estimator, row_rewards, spread
from megarl.algorithms.policy_loss import policy_loss
from megarl.algorithms.tokens import TokenLoss, select

@advantage_estimator("mine", row_level=True)
def mine(inputs, options):
    tokens = spread(row_rewards(inputs.rewards, inputs.mask) * 2, inputs.mask)
    return Advantages(advantages=tokens, returns=tokens)

@policy_loss("my_loss")
def my_loss(inputs, options):
    return TokenLoss(loss=-select(inputs.logprobs, inputs.mask))
"""


@pytest.fixture(autouse=True)
def _registries_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (advantage_estimator, policy_loss):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def _file(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_adds_estimators_and_losses_by_name(tmp_path: Path) -> None:
    path = _file(tmp_path, MINE)
    load_plugins([str(path)], KEY)
    inputs = AdvantageInputs(rewards=torch.tensor([[0.5, 1.0]]), mask=torch.ones(1, 2), groups=torch.zeros(1).long())
    assert advantage_estimator.get("mine")(inputs, AdvantageOptions()).advantages.tolist() == [[3.0, 3.0]]
    assert advantage_estimator.traits("mine").row_level and "my_loss" in policy_loss.names
    load_plugins([path], KEY)  # a second run in the same process


def test_the_example_in_the_documentation_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    load_plugins([_file(tmp_path, example)], KEY)
    rewards, mask = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2)
    inputs = AdvantageInputs(rewards=rewards, mask=mask, groups=torch.zeros(1).long())
    assert advantage_estimator.get("centred")(inputs, AdvantageOptions()).advantages.tolist() == [[0.5, 0.5]]
    tokens = PolicyLossInputs(logprobs=torch.zeros(2), old_logprobs=torch.zeros(2), advantages=rewards[0], mask=mask[0])
    assert policy_loss.get("unclipped")(tokens, PolicyLossOptions()).loss.tolist() == [0.0, -1.0]


def test_the_documentation_names_every_estimator_and_loss() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    for name in (*advantage_estimator.names, *policy_loss.names):
        assert f"| `{name}` |" in page


def test_files_of_one_name_in_two_folders_are_two_files(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [_file(tmp_path, MINE), _file(tmp_path / "other", MINE.replace('"mine"', '"ours"').replace("my_loss", "l"))]
    load_plugins(paths, KEY)
    assert {"mine", "ours"} <= set(advantage_estimator.names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module\n", r"mine.py, line 1, fails: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\ndef broken(:\n", r"mine.py, line 2, fails: SyntaxError: "),
        ("\n\n1 / 0\n", r"mine.py, line 3, fails: ZeroDivisionError: division by zero"),
        ("x = 1\n", r"mine.py registers nothing; decorate a function with @advantage_estimator\(name\)"),
        (MINE.replace('"mine"', '"grpo"'), r"'grpo' of .*mine.py already exists in .*group_advantages.py"),
        (MINE.replace("(inputs, options)", "(inputs)"), r"'mine' of .*mine.py takes \(inputs\), but it is called with"),
    ],
)
def test_a_file_that_does_not_work_is_answered_with_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^algorithm.plugins: .*{message}") as error:
        load_plugins([_file(tmp_path, text)], KEY)
    assert "\n" not in str(error.value)


def test_a_file_that_does_not_exist_or_is_no_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"algorithm.plugins: .*gone.py does not exist"):
        load_plugins([tmp_path / "gone.py"], KEY)
    with pytest.raises(ValueError, match=r"mine.txt is not a Python file; its name has to end in .py"):
        load_plugins([_file(tmp_path, MINE, "mine.txt")], KEY)
