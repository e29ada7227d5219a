"""Dumped rollouts of a run (`trainer.rollout_data_dir`) to parquet, to train on offline (`rollout.engine: dataset`):

    python tools/data/rollouts.py --rollouts runs/a/rollouts --steps 1:10 --out data/a/rollouts.parquet

Each prompt of each step becomes a row, with the token ids, scores and log-probs of its responses as they were.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rows import ROW_GROUP_ROWS, run, write_table

from megarl.config.errors import ConfigError
from megarl.config.schema_inputs import DataConfig
from megarl.data.sample import Sample
from megarl.trainers.dump import dumped_steps, read_step

ROW_GROUP_BYTES = 16 * 2**20
"""Training decodes a row group for each row that it draws, and rows of long responses are large."""

KEYS = DataConfig()
"""The columns' names that training expects unless it is told others."""

Numbers = dict[str, list[pa.Array]]
"""Columns of numbers by name, an array for each step: as Python objects, all steps together would not fit."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write dumped rollouts to parquet, as a dataset of responses.")
    parser.add_argument(
        "--rollouts", type=Path, required=True, metavar="DIR", help="trainer.rollout_data_dir of the run they are from"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="parquet file; replaced if it exists")
    parser.add_argument(
        "--steps", metavar="FIRST:LAST", help="both inclusive; 5 is one step, 5: that and all later ones (default: all)"
    )
    parser.add_argument("--min-score", type=float, metavar="X", help="leave out responses with a lower score")
    parser.add_argument(
        "--min-responses",
        type=int,
        default=1,
        metavar="N",
        help="leave out prompts with fewer responses than this, e.g. rollout.n of the next run (default: 1)",
    )
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    prompts: list[dict[str, Any]] = []
    numbers: Numbers = defaultdict(list)
    for step in chosen_steps(options.rollouts, options.steps):
        groups = list(chosen_groups(read_step(options.rollouts, step), options, counts))
        prompts += [prompt_row(step, group[0]) for group in groups]
        add_numbers(numbers, step, groups)
    print("; ".join(f"{count:,} {name}" for name, count in counts.items() if count))
    if not prompts:
        raise ConfigError(
            f"--rollouts {options.rollouts}: no prompt is left: lower --min-score or --min-responses, or name other "
            "--steps."
        )
    write(options.out, prompts, numbers)


def chosen_steps(folder: Path, wanted: str | None) -> list[int]:
    """The dumped steps that are wanted.

    Raises:
        ConfigError: there are none, or `wanted` is not a range.
    """
    steps = dumped_steps(folder)
    if not steps:
        raise ConfigError(
            f"--rollouts {folder} has no rollouts (step-*/rank-*.jsonl): name what trainer.rollout_data_dir was in the "
            "run that wrote them."
        )
    if wanted is None:
        return steps
    first, colon, last = wanted.partition(":")
    try:
        start = int(first) if first or not colon else steps[0]
        stop = start if not colon else int(last) if last else steps[-1]
    except ValueError:
        raise ConfigError(f"--steps {wanted} is not a range of steps: write FIRST:LAST, e.g. 1:10.") from None
    chosen = [step for step in steps if start <= step <= stop]
    if not chosen:
        raise ConfigError(f"--steps {wanted}: {folder} has steps from {steps[0]} to {steps[-1]}, but none of these.")
    return chosen


def chosen_groups(
    samples: Sequence[Sample], options: argparse.Namespace, counts: Counter[str]
) -> Iterator[list[Sample]]:
    """The wanted samples of each prompt of a step, where there are enough. Counts all, and those that are left out."""
    for _, members in groupby(samples, key=lambda sample: sample.group):
        group = list(members)
        whole = [sample for sample in group if sample.finish_reason != "abort"]
        kept = [sample for sample in whole if options.min_score is None or sample.rewards["score"] >= options.min_score]
        counts["responses"] += len(group)
        counts["left out, which were aborted"] += len(group) - len(whole)
        counts["left out by their score"] += len(whole) - len(kept)
        if len(kept) >= max(options.min_responses, 1):
            yield kept
        else:
            counts["left out with their prompt, which has too few"] += len(kept)


def prompt_row(step: int, sample: Sample) -> dict[str, Any]:
    """verl's columns of a prompt, and the step that its responses are from."""
    prompt = sample.prompt
    return {
        "data_source": prompt.data_source,
        "prompt": prompt.messages,
        "reward_model": prompt.reward_model or None,
        "extra_info": prompt.extra_info or None,
        "rollout_step": step,
    }


def add_numbers(numbers: Numbers, step: int, groups: Sequence[Sequence[Sample]]) -> None:
    """Adds one step's columns of numbers: a row for each prompt.

    Raises:
        ConfigError: a response with tokens that the model did not choose, for which there is no column.
    """
    for sample in (sample for group in groups for sample in group):
        if 0 in sample.response_mask:
            raise ConfigError(
                f"step {step}: a response to row {sample.prompt.row} has tokens that the model did not choose (of a "
                "tool), which a dataset of responses cannot say: train on the dump itself (rollout.replay_dir)."
            )
    take = lambda value_of: [[value_of(sample) for sample in group] for group in groups]
    columns = {
        KEYS.responses_key: (take(lambda sample: sample.response_ids), pa.list_(pa.list_(pa.int32()))),
        KEYS.rewards_key: (take(lambda sample: sample.rewards["score"]), pa.list_(pa.float64())),
        # float64, since the dump has what float64 prints
        KEYS.logprobs_key: (take(lambda sample: sample.rollout_logprobs), pa.list_(pa.list_(pa.float64()))),
    }
    for name, (values, kind) in columns.items():
        numbers[name].append(pa.array(values, kind))


def write(path: Path, prompts: list[dict[str, Any]], numbers: Numbers) -> None:
    """Writes everything, in row groups that are small to decode.

    Raises:
        ConfigError: log-probs of some steps only, prompts that do not fit into one table, or a file that cannot be
            written.
    """
    # A struct without fields cannot be written, nor would it say anything.
    empty = {name for name in ("reward_model", "extra_info") if all(row[name] is None for row in prompts)}
    try:
        table = pa.Table.from_pylist([{k: v for k, v in row.items() if k not in empty} for row in prompts])
    except pa.ArrowException as error:
        raise ConfigError(
            f"the prompts' columns have other types in some rows than in others ({error}): convert the steps apart "
            "(--steps)."
        ) from None
    for name, arrays in numbers.items():
        column = pa.chunked_array(arrays)
        if name != KEYS.logprobs_key or has_logprobs(column):
            table = table.append_column(name, column)
    write_table(path, table, max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES * table.num_rows // table.nbytes)))


def has_logprobs(column: pa.ChunkedArray) -> bool:
    """Whether there are log-probs: those of a run on data without them are NaN.

    Raises:
        ConfigError: some are NaN and others are not.
    """
    missing = pc.is_nan(pc.list_flatten(pc.list_flatten(column)))
    if pc.any(missing).as_py() and not pc.all(missing).as_py():
        raise ConfigError("some responses have log-probs and others do not: convert their steps apart (--steps).")
    return not pc.any(missing).as_py()


if __name__ == "__main__":
    run(main)
