"""Samples to score, and reward functions written to files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.config.schema import CustomRewardConfig, RewardConfig
from megarl.data.sample import Prompt, Sample
from megarl.rewards.manager import RewardManager


def sample(
    text: str,
    ground_truth: Any = "42",
    *,
    data_source: str = "test",
    style: str = "rule",
    extra_info: dict[str, Any] | None = None,
    row: int = 0,
) -> Sample:
    """A finished response to a prompt of that row."""
    prompt = Prompt(
        row=row,
        token_ids=[1],
        messages=[{"role": "user", "content": "?"}],
        data_source=data_source,
        reward_model={"style": style, "ground_truth": ground_truth},
        extra_info=extra_info or {},
    )
    return Sample(
        prompt=prompt,
        group=0,
        index=0,
        response_ids=[2],
        response_mask=[1],
        rollout_logprobs=[-1.0],
        finish_reason="stop",
        weight_version=0,
        response_text=text,
    )


def custom_config(folder: Path, source: str, *, num_workers: int = 2, timeout_s: float = 20.0) -> RewardConfig:
    """A config with the reward function that `source` defines; failures give −1."""
    path = folder / "my_reward.py"
    path.write_text(textwrap.dedent(source))
    return RewardConfig(
        custom=CustomRewardConfig(path=str(path)),
        num_workers=num_workers,
        timeout_s=timeout_s,
        failure_score=-1.0,
    )


@contextmanager
def custom_manager(
    folder: Path, source: str, *, num_workers: int = 2, timeout_s: float = 20.0
) -> Iterator[RewardManager]:
    """A manager with the reward function that `source` defines."""
    config = custom_config(folder, source, num_workers=num_workers, timeout_s=timeout_s)
    with RewardManager(config, []) as manager:
        yield manager


def score_all(manager: RewardManager, samples: list[Sample]) -> list[float]:
    """The scores of samples, in order."""
    for each in samples:
        manager.submit(each)
    return [each.rewards["score"] for each in manager.collect()]
