"""A tiny chat model and preferences over short answers, for runs of a few seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import transformers
import yaml

from tests.data.chat_models import make_chat_model
from tests.tiny_models import make_hf_model

WORDS = ("five", "well", "think", "step", "hello", "brief", "you", "token")


def pairs(count: int, offset: int) -> list[dict[str, Any]]:
    """Answers of several lengths; the one with `five` in it is preferred, now and then by a margin."""
    rows = []
    for i in range(offset, offset + count):
        words = [WORDS[(i + j) % 7 + 1] for j in range(2 + i % 5)]
        rows.append(
            {
                "prompt": f"How many are {i}?",
                "chosen": " ".join([*words, "five"]),
                "rejected": " ".join(words[: 1 + i % 3]),
                "margin": float(i % 3) / 2,
            }
        )
    return rows


def make_tiny_pairs(folder: Path, *, family: str = "qwen3", train: int = 16, **sections: dict[str, Any]) -> Path:
    """Writes model, data and config of a reward model run; returns the config's path.

    Args:
        sections: settings that are merged into the config's sections.
    """
    model = make_tiny_chat_model(folder / "model", family)
    pq.write_table(pa.Table.from_pylist(pairs(train, 0)), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(pairs(5, 1000)), folder / "val.parquet")
    config: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "train_files": str(folder / "train.parquet"),
            "val_files": str(folder / "val.parquet"),
            "train_batch_size": 8,
            "max_prompt_length": 40,
            "max_response_length": 24,
        },
        "actor": {"max_tokens_per_micro_batch": 144},
        "optim": {"lr": 1e-3, "eps": 1e-4},
        "trainer": {
            "kind": "reward_model",
            "default_local_dir": str(folder / "out"),
            "total_training_steps": 2,
            "val_before_train": False,
            "test_freq": 1,
            "logger": ["jsonl"],
        },
        "observe": {"peak_tflops": 0.1},
    }
    for section, settings in sections.items():
        config[section] = {**config.get(section, {}), **settings}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def make_tiny_chat_model(folder: Path, family: str, **changes: Any) -> Path:
    """A chat model with weights."""
    make_chat_model(folder)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return make_hf_model(family, folder, vocab_size=vocab_size, **changes)


def make_tiny_reward_model(folder: Path, family: str, **changes: Any) -> Path:
    """A reward model with weights, and the same tokenizer."""
    return make_tiny_chat_model(
        folder,
        family,
        auto_class=transformers.AutoModelForSequenceClassification,
        num_labels=1,
        **changes,
    )
