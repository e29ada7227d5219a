"""Scores samples beside generation and gives them back in order."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from importlib.util import find_spec
from types import TracebackType
from typing import NamedTuple, Self

from megarl.config.errors import ConfigError
from megarl.config.schema import RewardConfig
from megarl.data.sample import Prompt, Sample
from megarl.rewards.custom import SetupError
from megarl.rewards.graders import DATA_SOURCES, GRADERS, REASONING_GYM_PREFIX, grader_of
from megarl.rewards.messages import Setup
from megarl.rewards.outcome import SCORE, Failure, FailureKind, Outcome
from megarl.rewards.pool import WorkerPool

logger = logging.getLogger(__name__)


class RewardSource(NamedTuple):
    """What chooses the grader of a row."""

    data_source: str
    style: str | None
    """`reward_model.style`"""

    @classmethod
    def of(cls, prompt: Prompt) -> Self:
        return cls(prompt.data_source, prompt.reward_model.get("style"))


class RewardManager:
    """Worker processes that score samples while others are still being generated.

        with RewardManager(config.reward, sources) as rewards:
            rewards.submit(sample)      # as each response finishes
            …
            samples = rewards.collect() # in the order of submission, with `rewards` and `reward_failure` set

    Scoring never hangs and never fails silently: whatever goes wrong with a response is a named failure, which gives it
    `reward.failure_score`, is counted in `metrics`, and has its first traceback logged. Not for several threads.
    """

    def __init__(self, config: RewardConfig, sources: Iterable[RewardSource]) -> None:
        """Starts the workers and waits until they are ready, which takes a fraction of a second.

        Args:
            config: the run's `reward` section.
            sources: of all rows of the datasets, so that a row without grader is found now and not when it is drawn.

        Raises:
            ConfigError: rows without a grader, a package that is missing, or a function of the user's own that cannot
                be used.
        """
        self._config = config
        self._is_custom = config.custom.path is not None
        graders = () if self._is_custom else _graders(sources)
        setup = Setup(
            custom_path=config.custom.path, custom_name=config.custom.name, graders=graders, timeout_s=config.timeout_s
        )
        self._submitted: list[tuple[Sample, Future[Outcome]]] = []
        self._counts: Counter[FailureKind] = Counter()
        self._scored = 0
        self._logged: set[tuple[FailureKind, str]] = set()
        try:
            self._pool = WorkerPool(setup, config.num_workers)
        except SetupError as error:
            raise ConfigError(str(error)) from None

    @property
    def worker_pids(self) -> list[int]:
        """The processes that score at this moment."""
        return self._pool.pids

    def submit(self, sample: Sample) -> None:
        """Queues a finished response; returns at once.

        Raises:
            ConfigError: no grader for its data source, which then was not among `sources`.
        """
        prompt = sample.prompt
        arguments = {
            "data_source": prompt.data_source,
            "solution_str": sample.response_text,
            "ground_truth": prompt.reward_model.get("ground_truth"),
            "extra_info": prompt.extra_info,
        }
        grader = None if self._is_custom else _grader(RewardSource.of(prompt))
        self._submitted.append((sample, self._pool.submit(grader, arguments)))

    def collect(self) -> list[Sample]:
        """Waits for everything submitted since the last call, and gives it back in the order of submission.

        Raises:
            RuntimeError: workers cannot be started any more.
        """
        submitted, self._submitted = self._submitted, []
        self._counts.clear()
        self._scored = len(submitted)
        for sample, future in submitted:
            outcome = future.result()
            if isinstance(outcome, Failure):
                sample.rewards = {SCORE: self._config.failure_score}
                sample.reward_failure = str(outcome)
                self._counts[outcome.kind] += 1
                self._log_first(outcome, sample.prompt)
            else:
                sample.rewards = outcome
                sample.reward_failure = None
        return [sample for sample, _ in submitted]

    def metrics(self) -> dict[str, float]:
        """Counts of what the last `collect` gave back on this rank, to be summed over ranks.

        `reward/scored` are all responses, `reward/failed` those without a score, and `reward/failed/KIND` those of each
        `FailureKind`; always the same names.
        """
        return {
            "reward/scored": float(self._scored),
            "reward/failed": float(self._counts.total()),
            **{f"reward/failed/{kind}": float(self._counts[kind]) for kind in FailureKind},
        }

    def close(self) -> None:
        """Ends the workers. What was submitted and not collected is lost."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _log_first(self, failure: Failure, prompt: Prompt) -> None:
        key = (failure.kind, failure.cause)
        if key not in self._logged:
            self._logged.add(key)
            logger.warning(
                "A response to row %d (data_source %s) could not be scored and gets %g. %s. "
                "This is the first of its kind; others are only counted.\n%s",
                prompt.row,
                prompt.data_source,
                self._config.failure_score,
                failure,
                failure.traceback.rstrip(),
            )


def _graders(sources: Iterable[RewardSource]) -> tuple[str, ...]:
    """The graders of all sources.

    Raises:
        ConfigError: everything that is missing, as one report.
    """
    names, problems = set(), []
    for source in sorted(set(sources), key=repr):
        try:
            names.add(_grader(source))
        except ConfigError as error:
            problems += error.problems
    for name in sorted(names):
        package = GRADERS[name].package
        if package is not None and find_spec(package) is None:
            problems.append(
                f"rows graded by {name} need the package {package}, which is not installed: "
                f"pip install {GRADERS[name].install}."
            )
    if problems:
        raise ConfigError(problems)
    return tuple(sorted(names))


def _grader(source: RewardSource) -> str:
    name = grader_of(source.data_source, source.style)
    if name is None:
        raise ConfigError(
            f"rows with data_source '{source.data_source}' and reward_model.style '{source.style}' have no grader: "
            f"known data sources are {', '.join(DATA_SOURCES)} and {REASONING_GYM_PREFIX}TASK, known styles are rule, "
            f"{', '.join(GRADERS)}; or set reward.custom.path to a function of your own."
        )
    return name
