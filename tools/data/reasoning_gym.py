"""Tasks of reasoning-gym (github.com/open-thought/reasoning-gym, arXiv:2505.24760) to parquet:

    python tools/data/reasoning_gym.py --task chain_sum --param max_terms=2 --param max_digits=1 \\
        --size 152 --held-out-size 48 --out data/chain_sum/train.parquet --held-out data/chain_sum/test.parquet

A task's entry lies as JSON text in `extra_info.entry`, so that the package's own verifier can score a response.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rows import QUESTION, add_generator_options, add_prompt_options, fill_template, run, verl_row, write_generated

from megarl.config.errors import ConfigError

DATA_SOURCE = "reasoning_gym"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a reasoning-gym task to parquet in verl's columns.")
    parser.add_argument("--task", required=True, metavar="NAME", help="reasoning-gym's name of it, e.g. chain_sum")
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of the task's config; may be repeated",
    )
    parser.add_argument(
        "--grader",
        default="rule",
        metavar="NAME",
        help="megarl's grader of the rows (docs/rewards.md), e.g. gsm8k_flexible, which reads the last number of a "
        "response; default: the package's own verifier, which wants nothing but the answer",
    )
    add_generator_options(parser)
    add_prompt_options(parser, QUESTION)
    options = parser.parse_args()
    package = load_package()
    check_task(package, options.task)
    verify = package.get_score_answer_fn(options.task)

    def to_row(question: str, entry: dict[str, Any], number: int) -> dict[str, Any]:
        return verl_row(
            data_source=f"{DATA_SOURCE}/{options.task}",
            question=fill_template(options.template, question),
            system=options.system,
            style=options.grader,
            ground_truth=entry["answer"],
            extra_info={"index": number, "question": question, "entry": entry_to_json(options.task, entry, verify)},
        )

    per_dataset = max(1, options.size + options.held_out_size)
    entries = draw_entries(package, options.task, parse_params(options.param), options.seed, per_dataset)
    write_generated(options, ((entry["question"], entry) for entry in entries), to_row)


def load_package() -> Any:
    """The reasoning-gym package.

    Raises:
        ConfigError: it is not installed.
    """
    # Python looks for modules in the script's folder first, and would find this file for the package of its name.
    here = Path(__file__).resolve().parent
    sys.path = [entry for entry in sys.path if Path(entry).resolve() != here]
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ConfigError(f"the package reasoning-gym is not installed ({error}): pip install reasoning-gym.") from None


def check_task(package: Any, task: str) -> None:
    """Raises ConfigError, naming similar ones, where the package has no such task."""
    known = package.factory.DATASETS
    if task not in known:
        similar = get_close_matches(task, known, n=3) or sorted(known)
        raise ConfigError(f"--task {task}: reasoning-gym has no such task; did you mean {', '.join(similar)}?")


def parse_params(params: list[str]) -> dict[str, Any]:
    """`key=value` pairs; a value is a Python literal, or else a text.

    Raises:
        ConfigError: one without a key or an equals sign.
    """
    parsed = {}
    for param in params:
        key, equals, value = param.partition("=")
        if not key or not equals:
            raise ConfigError(f"--param {param} is not of the form key=value, e.g. max_terms=2.")
        try:
            parsed[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed[key] = value
    return parsed


def draw_entries(
    package: Any, task: str, params: dict[str, Any], seed: int, per_dataset: int
) -> Iterator[dict[str, Any]]:
    """Endless entries of a task, from datasets of following seeds.

    Raises:
        ConfigError: the task refuses the parameters.
    """
    try:
        # The entry of number i is drawn with seed + i, so the next dataset begins where this one ends.
        for start in itertools.count(seed, per_dataset):
            yield from package.create_dataset(task, size=per_dataset, seed=start, **params)
    except Exception as error:  # each task has checks of its own, most of them assertions
        raise ConfigError(
            f"--task {task} with {params or 'its defaults'} is refused by reasoning-gym ({error})."
        ) from None


def entry_to_json(task: str, entry: dict[str, Any], verify: Any) -> str:
    """The entry as JSON text.

    Raises:
        ConfigError: the verifier would judge the entry's own answer otherwise, since JSON keeps no tuples.
    """
    text = json.dumps(entry, ensure_ascii=False)
    answer = entry["answer"]
    if answer is not None and verify(answer, json.loads(text)) != verify(answer, entry):
        raise ConfigError(f"--task {task}: its verifier needs types that a dataset file does not keep; choose another.")
    return text


if __name__ == "__main__":
    run(main)
