"""Offline RL: prompts whose responses exist already, with or without rewards and log-probs (`rollout.engine: dataset`).

The files are those of `PromptDataset`, with further columns (`response_rows`). `OfflineResponses` stands where prompts
are drawn, and where an engine would generate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.config.errors import ConfigError
from megarl.config.schema import RunConfig
from megarl.data.chat import ChatTokenizer
from megarl.data.fingerprint import Fingerprint
from megarl.data.lengths import Progress
from megarl.data.prompts import PromptDataset
from megarl.data.response_rows import Response, ResponseRows
from megarl.data.sample import Prompt, Sample
from megarl.data.sampler import epoch_order

UNKNOWN_WEIGHTS = -1
"""The weight version of responses: which weights wrote them is not known."""

_ROWS_AT_ONCE = 64
"""Rows that are decoded at once: the responses of one may have hundreds of thousands of tokens."""

_PROGRESS_ROWS = 10_000


@dataclass(kw_only=True, slots=True)
class _Counts:
    """What the rows of usable prompts hold."""

    responses: int = 0
    longer: int = 0
    """Responses that are longer than allowed."""
    cut: int = 0
    """Those of them that are cut and used."""
    tokens: int = 0
    """Of responses that fit."""
    shortest: int = 0
    """Tokens, before cutting."""
    longest: int = 0
    """Tokens, after cutting."""

    def add(self, responses: Sequence[Response], fitting: Sequence[Response], limit: int) -> None:
        """Adds a row."""
        lengths = [len(response.token_ids) for response in responses]
        used = [len(response.token_ids) for response in fitting]
        longer = sum(length > limit for length in lengths)
        self.shortest = min(lengths) if self.responses == 0 else min(self.shortest, *lengths)
        self.longest = max(self.longest, *used, 0)
        self.responses += len(lengths)
        self.longer += longer
        self.cut += longer - (len(lengths) - len(used))
        self.tokens += sum(used)


class OfflineResponses:
    """The usable rows of files with responses, numbered from 0. Responses stay in the files until a row is drawn.

    A row gives `rollout.n` samples. One that has more responses gives others each time it is drawn, in an order of its
    own (random with `data.shuffle`, else that of the file), until all had their turn. Which ones follows from the row
    and the step alone, so neither the layout nor a resume changes it.
    """

    def __init__(self, config: RunConfig, chat: ChatTokenizer, progress: Progress | None = None) -> None:
        """Checks the rows of `data.train_files` and counts their tokens.

        Args:
            progress: told how far the counting is, every 10,000 rows.

        Raises:
            ConfigError: the first file, column or row that cannot be used, or none left; or settings that need what the
                files do not have.
        """
        self._config = config
        self._chat = chat
        self._seed = config.trainer.seed if config.data.seed is None else config.data.seed
        self._prompts = PromptDataset(config.data.train_files, chat, config.data, progress)
        self._rows = ResponseRows(config.data.train_files, chat, config.data, at_least=config.rollout.n)
        self._check_uses()
        self._counts = _Counts()
        self._fingerprint = Fingerprint()
        self._fingerprint.add([self._prompts.fingerprint])
        self._usable = np.flatnonzero(list(self._has_enough(progress)))
        if not len(self._usable):
            raise ConfigError(
                f"{', '.join(self._rows.files)}: no row has rollout.n = {config.rollout.n} responses of at most "
                f"data.max_response_length = {config.data.max_response_length} tokens (the shortest response has "
                f"{self._counts.shortest}): raise it, or lower rollout.n."
            )

    def __len__(self) -> int:
        return len(self._usable)

    @property
    def has_rewards(self) -> bool:
        """Whether samples come scored."""
        return self._rows.has_rewards

    @property
    def has_logprobs(self) -> bool:
        """Whether samples have rollout log-probs; if not, these are NaN, and nothing can be computed from them."""
        return self._rows.has_logprobs

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt, int32 [len(self)]."""
        return self._prompts.lengths[self._usable]

    @property
    def fingerprint(self) -> str:
        """Of the rows in the files, with their responses (`Fingerprint`)."""
        return self._fingerprint.hexdigest()

    @property
    def sources(self) -> frozenset[tuple[str, str | None]]:
        """(`data_source`, `reward_model.style`) of rows that need a grader: none where the data has rewards."""
        return frozenset() if self.has_rewards else self._prompts.sources

    def prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """Prompts by their numbers among the usable rows. One call for a batch is faster than a call for each."""
        return self._prompts.prompts(self._usable[list(indices)].tolist())

    def samples(self, mine: Sequence[tuple[int, Prompt]], step: int) -> list[Sample]:
        """`rollout.n` samples of each prompt, as an engine would have given them.

        Args:
            mine: (group, prompt): the group is the prompt's place in the step's batch of all ranks.
            step: of the run, from 1.

        Returns:
            Samples, ordered by group and index. `rewards` is empty where the data has none (`has_rewards`), for the
            caller to score. Rollout log-probs are NaN where it has none (`has_logprobs`): 0 would be probability 1.
        """
        ordered = sorted(mine, key=lambda item: item[0])
        numbers = [prompt.row for _, prompt in ordered]
        samples = []
        for (group, prompt), responses in zip(ordered, self._rows.read(numbers), strict=True):
            fitting = self._rows.fitting(prompt.row, responses)
            chosen = self._choose(prompt.row, len(fitting), self._times_drawn(group, step))
            samples += [self._sample(prompt, group, index, fitting[place]) for index, place in enumerate(chosen)]
        return samples

    def description(self) -> str:
        """How much is used, how much is left out and why; for rank 0 to print."""
        data, counts = self._config.data, self._counts
        fitting = counts.responses - counts.longer + counts.cut
        limit = f"data.max_response_length = {data.max_response_length} tokens"
        parts = [f"{fitting:,} of their {counts.responses:,} responses are used"]
        if left_out := counts.responses - fitting:
            parts.append(f"{left_out:,} left out, longer than {limit}")
        if counts.cut:
            parts.append(f"{counts.cut:,} cut at their end to {limit}")
        if rows := len(self._prompts) - len(self):
            parts.append(f"{rows:,} rows left out, which then have fewer than rollout.n = {self._config.rollout.n}")
        parts.append(f"up to {counts.longest} tokens, mean {counts.tokens / fitting:.1f}")
        parts.append(f"{'with' if self.has_rewards else 'without'} rewards ('{data.rewards_key}')")
        parts.append(f"{'with' if self.has_logprobs else 'without'} log-probs ('{data.logprobs_key}')")
        return f"{self._prompts.description()} {'; '.join(parts)}."

    def _has_enough(self, progress: Progress | None) -> Iterator[bool]:
        """Whether each usable prompt has as many responses that fit as a step takes."""
        numbers = self._prompts.row_numbers.tolist()
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            some = numbers[start : start + _ROWS_AT_ONCE]
            for done, (number, responses) in enumerate(zip(some, self._rows.read(some), strict=True), start + 1):
                fitting = self._rows.fitting(number, responses)
                self._counts.add(responses, fitting, self._config.data.max_response_length)
                self._fingerprint.add(responses)
                if progress and done % _PROGRESS_ROWS == 0:
                    progress(f"counted the tokens of the responses of {done:,} of {len(numbers):,} rows")
                yield len(fitting) >= self._config.rollout.n

    def _check_uses(self) -> None:
        """What validation of the config could not know: whether the files have what the settings need."""
        algorithm, data = self._config.algorithm, self._config.data
        correction = algorithm.rollout_correction
        files = ", ".join(self._rows.files)
        problems = []
        if not self.has_logprobs and (correction.rollout_is, correction.rollout_rs) != ("none", "none"):
            problems.append(
                f"algorithm.rollout_correction needs the log-probs of the policy that wrote the responses, but {files} "
                f"has no column '{data.logprobs_key}' (data.logprobs_key): add it, or set rollout_is and "
                "rollout_rs to none."
            )
        if self.has_rewards and algorithm.adv_estimator == "gdpo":
            problems.append(
                f"algorithm.adv_estimator gdpo needs several rewards by name, but column '{data.rewards_key}' of "
                f"{files} has one: name another estimator, or leave the column out so that responses are scored."
            )
        if self.has_rewards and self._config.reward.overlong_buffer.enable:
            problems.append(
                f"reward.overlong_buffer.enable is true, but the rewards of column '{data.rewards_key}' of {files} are "
                "used as they are: set it to false, or leave the column out so that responses are scored."
            )
        if problems:
            raise ConfigError(problems)

    def _times_drawn(self, group: int, step: int) -> int:
        """How often the row in this place of this step was drawn before: once in each epoch (`PromptSampler`)."""
        return ((step - 1) * self._config.data.train_batch_size + group) // len(self)

    def _choose(self, row: int, count: int, times_drawn: int) -> list[int]:
        """Which of a row's `count` responses are taken: the next ones in its order."""
        n = self._config.rollout.n
        order = epoch_order(count, row, shuffle=self._config.data.shuffle and count > n, seed=self._seed)
        return order[(times_drawn * n + np.arange(n)) % count].tolist()

    def _sample(self, prompt: Prompt, group: int, index: int, response: Response) -> Sample:
        length = len(response.token_ids)
        return Sample(
            prompt=prompt,
            group=group,
            index=index,
            response_ids=response.token_ids,
            response_mask=[1] * length,
            rollout_logprobs=[math.nan] * length if response.logprobs is None else response.logprobs,
            finish_reason="stop" if response.is_ended else "length",
            weight_version=UNKNOWN_WEIGHTS,
            response_text=self._chat.decode(response.token_ids),
            rewards={} if response.reward is None else {"score": response.reward},
        )
