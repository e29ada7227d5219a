"""Held-out prompts: the model's score on each data source, and the responses for people to read."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch.distributed as dist

from megarl.config import ConfigError
from megarl.data.prompts import PromptDataset
from megarl.data.sample import Sample
from megarl.parallel.groups import Groups
from megarl.rewards.outcome import SCORE
from megarl.trainers.generation import MODEL, RULE, Generator, Sampling, share_of

REPORTED = {SCORE: "reward", RULE: RULE, MODEL: MODEL}
"""The rewards that evaluations report, and their names in metrics."""

VALIDATION_DRAW = 2**31
"""Added to the step in the seeds of evaluation, so that they are not those of training."""


def evaluate(
    data: PromptDataset,
    generator: Generator,
    sampling: Sampling,
    groups: Groups,
    *,
    step: int,
    folder: str | Path,
    kind: str = "core",
) -> dict[str, float]:
    """Answers every prompt of `data` and scores the answers. Collective over the world.

    The same prompts are drawn with the same seeds in every evaluation, so that differences are the model's.

    Args:
        kind: which evaluation this is: `core`, or `sampled`.

    Returns:
        `val-<kind>/<source>/reward/mean@n` and, for n > 1, `best@n` and `pass@k`, on every rank. Where a reward model
        judges too, also `rule` and `model` in place of `reward`, the two parts of the score.

    Writes:
        `folder/<kind>-step-N.jsonl`, on rank 0: prompt, response and score of each sample.
    """
    assert generator.engine is not None
    share = share_of(len(data), groups.layout.world_size, groups.rank, generator.engine.size)
    prompts = list(zip(share, data.prompts(list(share)), strict=True))
    samples = generator.run(prompts, sampling, draw=VALIDATION_DRAW)
    everyones: list[list[Sample]] = [[] for _ in range(groups.layout.world_size)]
    dist.all_gather_object(everyones, samples)
    whole = sorted((s for part in everyones for s in part), key=lambda sample: (sample.group, sample.index))
    if groups.rank == 0:
        _write(whole, Path(folder) / f"{kind}-step-{step:06d}.jsonl")
    return {f"val-{kind}/{name}": value for name, value in validation_metrics(whole, sampling.n).items()}


def validation_metrics(samples: Sequence[Sample], n: int) -> dict[str, float]:
    """Means by data source, of samples of all prompts, n each: of the score as `reward`, and of its parts, if any.

    `mean@n`: mean score. `best@n`: mean of each prompt's best score. `pass@k` for k = 1, 2, 4, … ≤ n: the chance that
    one of k samples is right (score ≥ 1), by the unbiased estimator of arXiv:2107.03374.
    """
    scores: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        for reward, name in REPORTED.items():
            if reward in sample.rewards:
                scores[sample.prompt.data_source, name][sample.group].append(sample.rewards[reward])
    metrics = {}
    for (source, name), by_group in sorted(scores.items()):
        table = numpy.array([by_group[group] for group in sorted(by_group)])
        metrics[f"{source}/{name}/mean@{n}"] = float(table.mean())
        if n > 1:
            metrics[f"{source}/{name}/best@{n}"] = float(table.max(axis=1).mean())
        if n > 1 and name != MODEL:  # a reward model's score says nothing of right and wrong
            right = (table >= 1.0).sum(axis=1)
            for k in _powers_of_two(n):
                metrics[f"{source}/{name}/pass@{k}"] = float(numpy.mean([_pass_at_k(n, c, k) for c in right]))
    return metrics


def _powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def _pass_at_k(n: int, right: int, k: int) -> float:
    """1 − C(n − right, k) / C(n, k), as a product that does not overflow."""
    if n - right < k:
        return 1.0
    return float(1.0 - numpy.prod(1.0 - k / numpy.arange(n - right + 1, n + 1)))


def _write(samples: Sequence[Sample], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_lines(samples, path)
    except OSError as error:
        raise ConfigError(f"trainer.validation_data_dir: {path} cannot be written: {error.strerror}.") from None


def _write_lines(samples: Sequence[Sample], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            line = {
                "data_source": sample.prompt.data_source,
                "prompt": sample.prompt.messages,
                "response": sample.response_text,
                "ground_truth": sample.prompt.reward_model.get("ground_truth"),
                **sample.rewards,
                "finish_reason": sample.finish_reason,
                "failure": sample.reward_failure,
            }
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
