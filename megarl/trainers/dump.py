"""Rollouts on disk: every sample of a step with all that training needs, to look at or to train on again.

One folder a step, one JSONL file a rank: `step-000012/rank-00003.jsonl`, a sample a line. It does not matter how many
ranks wrote when they are read.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Collection
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.data.sample import Sample, sample_from_json, sample_to_json

_RANK_FILES = "rank-*.jsonl"


class RolloutDump:
    """Writes the samples of this rank (`trainer.rollout_data_dir`)."""

    def __init__(self, folder: str | Path, rank: int, world_size: int) -> None:
        self._folder = Path(folder)
        self._rank, self._world_size = rank, world_size

    def write(self, step: int, samples: list[Sample]) -> None:
        """Writes one step; files of that step from an earlier run, with more ranks too, are replaced.

        Raises:
            ConfigError: it cannot be written.
        """
        folder = _step_folder(self._folder, step)
        path = folder / f"rank-{self._rank:05d}.jsonl"
        unfinished = path.with_suffix(".unfinished")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("w", encoding="utf-8") as file:
                for sample in samples:
                    file.write(json.dumps(sample_to_json(sample), ensure_ascii=False) + "\n")
            unfinished.replace(path)
            if self._rank == 0:
                for other in folder.glob(_RANK_FILES):
                    if _rank_of(other) >= self._world_size:
                        other.unlink()
        except OSError as error:
            raise ConfigError(f"trainer.rollout_data_dir: {path} cannot be written: {error.strerror}.") from None


class RolloutReplay:
    """Reads samples back instead of generating them (`rollout.replay_dir`)."""

    def __init__(self, folder: str | Path, samples_per_prompt: int) -> None:
        """Raises ConfigError where there are no dumps."""
        self._folder = Path(folder)
        self._samples_per_prompt = samples_per_prompt
        if not dumped_steps(self._folder):
            raise ConfigError(
                f"rollout.replay_dir {folder} has no rollouts (step-*/rank-*.jsonl); an earlier run writes them with "
                "trainer.rollout_data_dir."
            )

    def read(self, step: int, groups: Collection[int]) -> list[Sample]:
        """The samples of these groups, ordered by group and index.

        Raises:
            ConfigError: the step is not there, has other samples than these groups', or a line is not a sample.
        """
        if not any(_step_folder(self._folder, step).glob(_RANK_FILES)):
            folder = _step_folder(self._folder, step)
            raise ConfigError(f"rollout.replay_dir: {folder} has no rollouts; the dump ends before step {step}.")
        samples = read_step(self._folder, step, groups)
        counts = collections.Counter(sample.group for sample in samples)
        for group in sorted(groups):
            if counts[group] != self._samples_per_prompt:
                raise ConfigError(
                    f"rollout.replay_dir: {_step_folder(self._folder, step)} has {counts[group]} samples of prompt "
                    f"{group}, where rollout.n is {self._samples_per_prompt}; replay with rollout.n and "
                    "data.train_batch_size of the run that wrote them."
                )
        return samples


def dumped_steps(folder: str | Path) -> list[int]:
    """The steps that a folder has rollouts of, ascending."""
    names = {path.parent.name.removeprefix("step-") for path in Path(folder).glob(f"step-*/{_RANK_FILES}")}
    return sorted(int(name) for name in names if name.isdecimal())


def read_step(folder: str | Path, step: int, groups: Collection[int] | None = None) -> list[Sample]:
    """The samples of a step, ordered by group and index.

    Args:
        groups: whose samples are wanted; None: all.

    Raises:
        ConfigError: a line is not a sample, or a sample is there twice.
    """
    samples = []
    places = set()
    for path in sorted(_step_folder(Path(folder), step).glob(_RANK_FILES)):
        # By line feeds alone: str.splitlines would also split at U+2028 and the like, which JSON leaves in texts.
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                sample = _parse(path, number, line)
                if (sample.group, sample.index) in places:
                    raise ConfigError(
                        f"{path}, line {number} is another sample {sample.index} of prompt {sample.group}: an earlier "
                        "run wrote to the same folder; remove what it left."
                    )
                places.add((sample.group, sample.index))
                if groups is None or sample.group in groups:
                    samples.append(sample)
    return sorted(samples, key=lambda sample: (sample.group, sample.index))


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def _parse(path: Path, number: int, line: str) -> Sample:
    try:
        return sample_from_json(json.loads(line))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}, line {number} is not a sample ({error}); take the dump from the run again."
        ) from None
