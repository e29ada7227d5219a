"""The pairs of a round: the policy answers prompts, and its answers are paired."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from megarl.algorithms.preference import preference_loss, win_rates
from megarl.config import ConfigError, RunConfig
from megarl.config.schema_inputs import DataConfig
from megarl.data.chat import load_chat_tokenizer
from megarl.data.demonstrations import Demonstrations
from megarl.data.prompts import PromptDataset
from megarl.data.sample import Sample
from megarl.data.sampler import PromptSampler
from megarl.data.win_rates import WIN_RATE_KEYS
from megarl.parallel.groups import Groups
from megarl.rewards.outcome import SCORE
from megarl.rollout.engine import Engine
from megarl.trainers.generation import Generator, share_of
from megarl.trainers.generation_setup import build_generator, build_graders, training_sampling
from megarl.trainers.setup import load_model
from megarl.trainers.sync import plan_sync, sync_weights
from megarl.weights.bucket_stream import Traffic
from megarl.weights.together import raise_together

PAIRS_NAME = "pairs.parquet"

_PROMPTS_AT_ONCE = 256
"""Prompts whose responses are in memory at a time."""

_BATCHES_PER_ROUND = 2**24
"""More than any round has: each batch of prompts of each round then draws by a seed of its own."""

Pair = dict[str, Any]
"""One row of the file."""


class NoPair(ValueError):
    """Why the answers to a prompt give no pair, in words that follow the number of such prompts."""


@dataclass(kw_only=True, slots=True)
class RoundPairs:
    """What came of a round's prompts."""

    pairs: list[Pair] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Prompts without a pair, by reason."""
    scores: list[float] = field(default_factory=list)
    """Of all answers; empty where nothing scores."""

    def description(self) -> str:
        """In one sentence, for people."""
        parts = [f"{len(self.pairs):,} pairs from {len(self.pairs) + self.left_out.total():,} prompts"]
        parts += [f"{count:,} {reason}" for reason, count in self.left_out.items()]
        if self.scores:
            parts.append(f"mean score {sum(self.scores) / len(self.scores):.4f}")
        return "; ".join(parts)


def generate_pairs(config: RunConfig, groups: Groups, number: int, folder: Path) -> str:
    """Writes `PAIRS_NAME` into a round's folder. Collective over the world.

    Its columns are those of pairs (`data.prompt_key`, `data.chosen_key`, `data.rejected_key`) and, where answers are
    scored, the score and win rate of both.

    Args:
        config: of the round: `model.path` is the policy that answers.
        number: of the round, from 1.

    Returns:
        What came of it, in one sentence; the same on every rank.

    Raises:
        ConfigError: data, graders or reward model cannot be used, or no pair is left.
    """
    chat = load_chat_tokenizer(config.model.path)
    imitates = preference_loss.traits(config.preference.loss_type).imitates
    data = (Demonstrations if imitates else PromptDataset)(config.data.train_files, chat, config.data)
    indices = _prompts_of_round(config, len(data), number)
    graders = build_graders(config, data.sources) if isinstance(data, PromptDataset) else None
    generator = None
    try:
        generator = build_generator(config, groups, chat, graders, generates=True)
        _load_engine(config, groups, generator)
        found = RoundPairs()
        for batch, answers in _answers(config, groups, generator, data, indices, number):
            for index, samples in zip(batch, answers, strict=True):
                response = data.responses([index])[0] if isinstance(data, Demonstrations) else None
                add_pair(found, samples, config, response)
    finally:
        if generator is not None:
            generator.close()
        elif graders is not None:
            graders.close()
    problem = _too_few(found, config, number) if groups.rank == 0 else None
    raise_together(problem)
    outcome = [f"round {number}: {found.description()}"]
    dist.broadcast_object_list(outcome)
    if groups.rank == 0:
        _write(folder / PAIRS_NAME, found.pairs)
    dist.barrier()
    return outcome[0]


def pairs_are_readable(file: Path) -> bool:
    """Whether the pairs of a round are there and whole."""
    try:
        pq.read_table(file)
    except (OSError, pa.ArrowInvalid):
        return False
    return True


def imitation_pair(samples: Sequence[Sample], response: str, keys: DataConfig) -> Pair:
    """The data's response, and the policy's own as the rejected one (SPIN, arXiv:2401.01335).

    Raises:
        NoPair: the answer has no text, or is the data's.
    """
    (sample,) = samples
    if not sample.response_text.strip():
        raise NoPair("have an answer without text")
    if sample.response_text == response:
        raise NoPair("have the data's response as answer")
    return {
        keys.prompt_key: sample.prompt.messages,
        keys.chosen_key: response,
        keys.rejected_key: sample.response_text,
    }


def scored_pair(samples: Sequence[Sample], keys: DataConfig, *, hard: bool) -> Pair:
    """The best and the worst of the answers to a prompt by score, the first of equal ones.

    An answer that was cut off at the longest length can be the worst, but not the best: the pair would teach to end
    there. Answers without text, or whose scoring failed, are none.

    Args:
        hard: see `win_rates`.

    Raises:
        NoPair: no two of them are of different worth.
    """
    usable = [s for s in samples if s.response_text.strip() and s.reward_failure is None]
    ended = [place for place, sample in enumerate(usable) if sample.finish_reason == "stop"]
    if not ended:
        raise NoPair("have no answer with an end, a text and a score")
    scores = torch.tensor([sample.rewards[SCORE] for sample in usable])
    best = max(ended, key=lambda place: float(scores[place]))
    worst = int(scores.argmin())
    if scores[best] <= scores[worst]:
        raise NoPair("have no answer that scores above another")
    rates = win_rates(scores, hard=hard)
    pair: Pair = {keys.prompt_key: usable[best].prompt.messages}
    for key, rate_key, place in zip((keys.chosen_key, keys.rejected_key), WIN_RATE_KEYS, (best, worst), strict=True):
        pair[key] = usable[place].response_text
        pair[f"{key}_score"] = float(scores[place])
        pair[rate_key] = float(rates[place])
    return pair


def add_pair(found: RoundPairs, samples: Sequence[Sample], config: RunConfig, response: str | None) -> None:
    """Adds what the answers to one prompt give.

    Args:
        response: the data's, where the loss imitates it.
    """
    try:
        if response is not None:
            found.pairs.append(imitation_pair(samples, response, config.data))
        else:
            found.scores += [sample.rewards[SCORE] for sample in samples]
            found.pairs.append(scored_pair(samples, config.data, hard=config.preference.win_rate == "hard"))
    except NoPair as reason:
        found.left_out[str(reason)] += 1


def _too_few(found: RoundPairs, config: RunConfig, number: int) -> str | None:
    """Why the pairs are not enough to train on."""
    size = config.data.train_batch_size
    rows = len(found.pairs) * (2 if preference_loss.traits(config.preference.loss_type).labelled else 1)
    if rows >= size:
        return None
    return (
        f"round {number} gave only {found.description()}: that does not fill a data.train_batch_size of {size}; lower "
        "it, or give more prompts, more samples of each (rollout.n), or a reward that tells them apart."
    )


def _prompts_of_round(config: RunConfig, size: int, number: int) -> Sequence[int]:
    wanted = config.preference.prompts_per_round
    if wanted is None:
        return range(size)
    if wanted > size:
        raise ConfigError(
            f"preference.prompts_per_round is {wanted}, but data.train_files have only {size} usable prompts: lower it "
            "to that or less, or leave it out."
        )
    seed = config.data.seed if config.data.seed is not None else config.trainer.seed
    sampler = PromptSampler(size, wanted, shuffle=config.data.shuffle, seed=seed)
    return [sampler.next_batch() for _ in range(number)][-1]


def _load_engine(config: RunConfig, groups: Groups, generator: Generator) -> None:
    """Gives the engine the weights of `model.path`, sharded here and no longer than this takes. Collective."""
    assert generator.engine is not None
    check = config.rollout.check_weight_sync

    def give(engine: Engine) -> Traffic:
        policy = load_model(config, groups)
        return sync_weights(plan_sync(policy, config.rollout), engine, 0, check=check)

    generator.engine.sync(give)


def _answers(
    config: RunConfig,
    groups: Groups,
    generator: Generator,
    data: Demonstrations | PromptDataset,
    indices: Sequence[int],
    number: int,
) -> Iterator[tuple[Sequence[int], list[list[Sample]]]]:
    """Batches of prompts by number, with the answers to each, on rank 0; nothing on the others. Collective."""
    assert generator.engine is not None
    sampling, world = training_sampling(config), groups.layout.world_size
    if isinstance(data, Demonstrations):
        sampling = dataclasses.replace(sampling, n=1)
    for start in range(0, len(indices), _PROMPTS_AT_ONCE):
        batch = indices[start : start + _PROMPTS_AT_ONCE]
        share = share_of(len(batch), world, groups.rank, generator.engine.size)
        prompts = list(zip(share, data.prompts([batch[place] for place in share]), strict=True))
        draw = number * _BATCHES_PER_ROUND + start // _PROMPTS_AT_ONCE
        samples = generator.run(prompts, sampling, draw=draw)
        everyones: list[Any] | None = [None] * world if groups.rank == 0 else None
        dist.gather_object(samples, everyones)
        if everyones is not None:
            by_group: dict[int, list[Sample]] = {place: [] for place in range(len(batch))}
            for sample in (sample for part in everyones for sample in part):
                by_group[sample.group].append(sample)
            yield batch, list(by_group.values())


def _write(file: Path, pairs: list[Pair]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.new")
    pq.write_table(pa.Table.from_pylist(pairs), temporary)
    os.replace(temporary, file)
