"""The same rows have the same fingerprint however files divide them, and other rows another, in every kind of data."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import RunConfig
from megarl.data.chat import ChatTokenizer, load_chat_tokenizer
from megarl.data.labelled import load_labelled
from megarl.data.pairs import PairDataset
from megarl.data.prompts import PromptDataset
from megarl.data.responses import OfflineResponses
from megarl.data.sft import SftDataset
from tests.data.chat_models import make_chat_model

Row = dict[str, Any]


def offline(files: list[str], chat: ChatTokenizer) -> OfflineResponses:
    config = RunConfig()
    config.data.train_files, config.rollout.engine, config.rollout.n = files, "dataset", 2
    return OfflineResponses(config, chat)


def dataset(kind: type | Callable[..., Any]) -> Callable[[list[str], ChatTokenizer], Any]:
    return lambda files, chat: kind(files, chat, RunConfig().data)


QUESTION = [{"role": "user", "content": "Hi"}]
KINDS: dict[str, tuple[Callable[[list[str], ChatTokenizer], Any], Row, list[Row]]] = {
    "prompts": (
        dataset(PromptDataset),
        {
            "data_source": "sums",
            "prompt": QUESTION,
            "reward_model": {"ground_truth": "5"},
            "extra_info": {"day": datetime.date(2026, 1, 2), "hint": None},
        },
        [
            {"data_source": "sets"},
            {"prompt": [{"role": "user", "content": "Ho"}]},
            {"reward_model": {"ground_truth": "6"}},
            {"extra_info": {"day": datetime.date(2026, 1, 3), "hint": None}},
        ],
    ),
    "offline": (
        offline,
        {"data_source": "sums", "prompt": QUESTION, "responses": ["five", "six"], "response_rewards": [1.0, 0.0]},
        [{"responses": ["five", "two"]}, {"response_rewards": [1.0, 0.25]}],
    ),
    "sft": (dataset(SftDataset), {"prompt": "Hi", "response": "five"}, [{"prompt": "Ho"}, {"response": "six"}]),
    "pairs": (
        dataset(PairDataset),
        {"prompt": "Hi", "chosen": "five", "rejected": "six", "margin": 1.0},
        [{"chosen": "four"}, {"rejected": "two"}, {"margin": 2.0}],
    ),
    "labelled": (
        dataset(load_labelled),
        {"prompt": "Hi", "response": "five", "label": True},
        [{"response": "six"}, {"label": False}],
    ),
    "labelled pairs": (
        dataset(load_labelled),
        {"prompt": "Hi", "chosen": "five", "rejected": "six"},
        [{"rejected": "two"}],
    ),
}
COUNT, CHANGED = 5, 3


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load_chat_tokenizer(make_chat_model(tmp_path_factory.mktemp("model")))


def numbered(row: Row) -> list[Row]:
    """Rows that differ in their prompts."""
    rows = [dict(row) for _ in range(COUNT)]
    for number, each in enumerate(rows):
        text = f"Hi {number}"
        each["prompt"] = text if isinstance(row["prompt"], str) else [{"role": "user", "content": text}]
    return rows


def write(folder: Path, name: str, rows: Sequence[Row], row_group_size: int) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / name, row_group_size=row_group_size)
    return str(folder / name)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_that_of_the_rows_and_not_of_the_files(kind: str, tmp_path: Path, chat: ChatTokenizer) -> None:
    load, row, _ = KINDS[kind]
    rows = numbered(row)
    whole = load([write(tmp_path, "whole", rows, COUNT)], chat)
    parts = load([write(tmp_path, "first", rows[:2], 1), write(tmp_path, "rest", rows[2:], 2)], chat)
    assert parts.fingerprint == whole.fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_and_the_order_count(kind: str, tmp_path: Path, chat: ChatTokenizer) -> None:
    load, row, changes = KINDS[kind]
    rows = numbered(row)
    others = [[{**each, **(change if i == CHANGED else {})} for i, each in enumerate(rows)] for change in changes]
    versions = enumerate([rows, rows[::-1], *others])
    datasets = [load([write(tmp_path, str(number), version, COUNT)], chat) for number, version in versions]
    assert len({len(each) for each in datasets}) == 1
    assert len({each.fingerprint for each in datasets}) == 2 + len(changes)
