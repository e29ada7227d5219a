"""A tiny chat model, prompts and a reward function, for runs of a few seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.data.chat_models import make_chat_model
from tests.tiny_models import make_hf_model

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Many different scores, so that no group is without variance."""
    return sum(map(ord, solution_str)) % 17 / 16.0
'''


def make_tiny_run(folder: Path, *, family: str = "qwen3", prompts: int = 16, **sections: dict[str, Any]) -> Path:
    """Writes model, data, reward function and config; returns the config's path.

    Args:
        sections: settings that are merged into the config's sections.
    """
    model = make_chat_model(folder / "model")
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    make_hf_model(family, model, vocab_size=vocab_size)
    for name, count, offset in (("train", prompts, 0), ("test", 5, 1000)):
        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"What is {i} plus {offset + 7 * i}?"}],
                "reward_model": {"style": "rule", "ground_truth": str(offset + 8 * i)},
                "extra_info": {"index": i},
            }
            for i in range(count)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "reward.py").write_text(REWARD)
    config: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "train_files": str(folder / "train.parquet"),
            "val_files": str(folder / "test.parquet"),
            "train_batch_size": 4,
            "max_prompt_length": 40,
            "max_response_length": 12,
        },
        "actor": {"ppo_mini_batch_size": 2, "max_tokens_per_micro_batch": 128},
        "rollout": {"n": 4},
        "reward": {"custom": {"path": str(folder / "reward.py")}, "num_workers": 1},
        "optim": {"lr": 1e-3, "eps": 1e-4},
        "trainer": {
            "default_local_dir": str(folder / "out"),
            "total_training_steps": 1,
            "val_before_train": False,
            "logger": ["jsonl"],
        },
        "observe": {"peak_tflops": 0.1},
    }
    for section, settings in sections.items():
        config[section] = {**config.get(section, {}), **settings}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; of one that goes on, those that are whole."""
    whole, _, _ = (folder / "metrics.jsonl").read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
