"""GSM8K to parquet, from the published JSON lines (github.com/openai/grade-school-math, arXiv:2110.14168):

    python tools/data/gsm8k.py --input grade-school-math/grade_school_math/data --out data/gsm8k

Each FILE.jsonl becomes OUT/FILE.parquet, with the data source, prompt and columns that verl's GSM8K files have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rows import QUESTION, add_prompt_options, fill_template, run, verl_row, write_rows

from megarl.config.errors import ConfigError

TEMPLATE = f'{QUESTION} Let\'s think step by step and output the final answer after "####".'
"""verl's instruction; its GSM8K grader looks for what follows the mark."""

ANSWER_MARK = "####"
SPLITS = ("train.jsonl", "test.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert GSM8K's JSON lines to parquet in verl's columns.")
    parser.add_argument(
        "--input",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="folder with train.jsonl and test.jsonl, or files",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("data/gsm8k"),
        metavar="DIR",
        help="folder for the parquet files (default: data/gsm8k)",
    )
    add_prompt_options(parser, TEMPLATE)
    options = parser.parse_args()
    for file in find_files(options.input):
        rows = [to_row(file, number, entry, options) for number, entry in read_entries(file)]
        write_rows(options.out / f"{file.stem}.parquet", rows)


def find_files(inputs: list[Path]) -> list[Path]:
    """The files that are meant: those of the known splits in a folder, and files as they are.

    Raises:
        ConfigError: a path that is not there, or a folder without the splits.
    """
    files = []
    for path in inputs:
        found = [path / name for name in SPLITS if (path / name).is_file()] if path.is_dir() else [path]
        if not found or not all(file.is_file() for file in found):
            raise ConfigError(f"--input {path}: there is no such file, nor a folder with {' or '.join(SPLITS)} in it.")
        files += found
    return files


def read_entries(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line from 0, its JSON object) of every line.

    Raises:
        ConfigError: a line that is not a question with its answer.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
                is_entry = isinstance(entry["question"], str) and ANSWER_MARK in entry["answer"]
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
                is_entry = False
            if not is_entry:
                raise ConfigError(
                    f"{file}, line {number + 1} is not a GSM8K entry: a JSON object with a question, and an answer "
                    f"that has '{ANSWER_MARK}' before its number."
                )
            yield number, entry


def to_row(file: Path, number: int, entry: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One row; the ground truth is the number after the mark, without thousands separators."""
    ground_truth = entry["answer"].rpartition(ANSWER_MARK)[2].strip().replace(",", "")
    return verl_row(
        data_source="openai/gsm8k",
        question=fill_template(options.template, entry["question"]),
        system=options.system,
        style="rule",
        ground_truth=ground_truth,
        extra_info={"split": file.stem, "index": number, "question": entry["question"], "answer": entry["answer"]},
    )


if __name__ == "__main__":
    run(main)
