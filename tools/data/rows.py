"""What the dataset tools share: rows in verl's columns, distinct questions, and files that are never half-written."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.errors import ConfigError

ROW_GROUP_ROWS = 1_000
"""Small row groups, since training draws rows in random order and decodes a row group for each."""

QUESTION = "{question}"
"""What a template has in the place of the question."""

_DRAWS_PER_QUESTION = 50
"""Of K equally likely questions, drawing all takes about K·ln K draws: 50 for each is enough beyond any real K."""

_BAD_INPUT = 2


def verl_row(
    *,
    data_source: str,
    question: str,
    style: str,
    ground_truth: str | None,
    extra_info: dict[str, Any],
    system: str | None = None,
) -> dict[str, Any]:
    """One row in verl's columns: a chat prompt, and what its grader needs."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {
        "data_source": data_source,
        "prompt": [*messages, {"role": "user", "content": question}],
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def add_prompt_options(parser: argparse.ArgumentParser, template: str) -> None:
    """`--template` and `--system`: how a question is put to the model."""
    parser.add_argument(
        "--template",
        default=template,
        metavar="TEXT",
        help=f"the user message around {QUESTION} (default: {template!r})",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message (default: none)")


def add_generator_options(parser: argparse.ArgumentParser) -> None:
    """The options of tools that make questions up: how many, which, and where they go."""
    parser.add_argument("--size", type=int, required=True, metavar="N", help="rows to write")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="the same seed makes the same file (default: 0)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="parquet file; replaced if it exists")
    parser.add_argument("--held-out-size", type=int, default=0, metavar="N", help="further rows, of other questions")
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="parquet file for them")


def fill_template(template: str, question: str) -> str:
    """The template with the question in it.

    Raises:
        ConfigError: it has no place for one.
    """
    if QUESTION not in template:
        raise ConfigError(f"--template {template!r} has no {QUESTION}, so every prompt would be the same: add it.")
    return template.replace(QUESTION, question)


def write_generated(options: argparse.Namespace, draws: Iterable[tuple[str, Any]], to_row: Callable[..., Any]) -> None:
    """Draws distinct questions, and writes them to `--out` and `--held-out`, none to both.

    Args:
        draws: (question, what `to_row` needs of it); the same questions may come again and again.
        to_row: from (question, that, its number in the file) to a row.

    Raises:
        ConfigError: options that contradict one another, or not enough distinct questions.
    """
    if options.size < 1 or options.held_out_size < 0:
        raise ConfigError(f"--size is {options.size}, --held-out-size {options.held_out_size}: rows cannot be fewer.")
    if (options.held_out is None) != (options.held_out_size == 0):
        raise ConfigError("--held-out FILE and --held-out-size N belong together: give both or neither.")
    if options.held_out is not None and options.held_out.resolve() == options.out.resolve():
        raise ConfigError(f"--out and --held-out are both {options.out}: name two files.")
    questions = _distinct(draws, options.size + options.held_out_size)
    # Common questions are found first: unshuffled, the held-out ones would be the rare ones.
    random.Random(options.seed).shuffle(questions)
    _write(options.out, questions[: options.size], to_row)
    if options.held_out is not None:
        _write(options.held_out, questions[options.size :], to_row)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a parquet file. An existing one is replaced, when the new one is whole.

    Raises:
        ConfigError: there are no rows, or the file cannot be written.
    """
    if not rows:
        raise ConfigError(f"{path} would have no rows: the input is empty.")
    write_table(path, pa.Table.from_pylist(list(rows)), ROW_GROUP_ROWS)


def write_table(path: Path, table: pa.Table, row_group_rows: int) -> None:
    """Writes a parquet file, as `write_rows` does.

    Raises:
        ConfigError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.part{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, part, row_group_size=row_group_rows)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}); choose another place.") from None
    finally:
        part.unlink(missing_ok=True)
    print(f"wrote {table.num_rows:,} rows to {path}")


def run(main: Callable[[], None]) -> None:
    """Runs a tool and ends the process; a person's mistake is one sentence and exit status 2."""
    try:
        main()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(_BAD_INPUT)


def _distinct(draws: Iterable[tuple[str, Any]], wanted: int) -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for number, (question, rest) in enumerate(draws):
        found.setdefault(question, rest)
        if len(found) == wanted:
            return list(found.items())
        if number >= wanted * _DRAWS_PER_QUESTION:
            break
    raise ConfigError(
        f"{wanted} different questions were asked for, but with these settings there are about {len(found)}: "
        "lower --size or --held-out-size, or make the task wider."
    )


def _write(path: Path, questions: Sequence[tuple[str, Any]], to_row: Callable[..., Any]) -> None:
    write_rows(path, [to_row(question, rest, number) for number, (question, rest) in enumerate(questions)])
