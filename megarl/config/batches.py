"""The arithmetic of batches: how the global sizes of a config fall on ranks, mini-batches and micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Self

from megarl.config.layout import Layout
from megarl.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """The sizes of one step. Where `problems` says something, the others mean nothing."""

    layout: Layout
    prompts: int
    """Prompts (or, where nothing is generated: rows, pairs or responses) of one step over all ranks."""
    samples_per_prompt: int
    """1 where nothing is generated."""
    mini_batch_prompts: int
    """The same of one optimizer step over all ranks."""
    epochs: int
    """Times that each sample of a step is trained on."""
    max_sample_tokens: int
    """Tokens of the longest sample."""
    micro_batch_tokens: int
    """Tokens of one micro-batch on one data-parallel rank."""
    together: int
    """Sequences that are in one micro-batch: 2 for pairs."""
    row: str | None
    """What a row of the data is called where nothing is generated; None for RL."""

    @classmethod
    def of(cls, config: RunConfig, layout: Layout) -> Self:
        # kto takes single responses; what a loss of a person's own takes is known when its file is imported.
        preference = "response" if config.preference.loss_type == "kto" else "pair"
        row = {"sft": "row", "reward_model": "pair", "preference": preference}.get(config.trainer.kind)
        return cls(
            layout=layout,
            prompts=config.data.train_batch_size,
            samples_per_prompt=1 if row else config.rollout.n,
            mini_batch_prompts=config.data.train_batch_size if row else config.actor.ppo_mini_batch_size,
            epochs=1 if row else config.actor.ppo_epochs,
            max_sample_tokens=config.data.max_prompt_length + config.data.max_response_length,
            micro_batch_tokens=config.actor.max_tokens_per_micro_batch,
            together=2 if row == "pair" else 1,
            row=row,
        )

    @property
    def samples(self) -> int:
        """Samples of one step over all ranks."""
        return self.prompts * self.samples_per_prompt

    @property
    def mini_batches(self) -> int:
        """Optimizer steps of one epoch of a step."""
        return self.prompts // self.mini_batch_prompts

    def problems(self) -> Iterator[str]:
        """Every reason why these sizes do not work, with the nearest that do."""
        if self.samples % self.layout.dp:
            yield self._uneven_share(
                "data.train_batch_size", self.prompts, _neighbours(self.prompts, self._prompt_multiple)
            )
        if not self.row:
            yield from self._mini_batch_problems()
        padded = -(-self.max_sample_tokens // self._sample_multiple) * self._sample_multiple
        if padded * self.together > self.micro_batch_tokens:
            padding = f" (padded to {padded} for context parallelism)" if padded != self.max_sample_tokens else ""
            pair = ", and the two of a pair stay together" if self.together > 1 else ""
            yield (
                f"actor.max_tokens_per_micro_batch is {self.micro_batch_tokens} tokens, but one sample may have "
                f"data.max_prompt_length + data.max_response_length = {self.max_sample_tokens} tokens{padding}{pair}: "
                f"set it to at least {padded * self.together}."
            )

    def describe(self) -> str:
        """One step in words, for people; a line each for samples, updates and micro-batches."""
        share = f"{self.samples // self.layout.dp} on each of {_count(self.layout.dp, 'data-parallel rank')}"
        micro_batch = (
            f"micro-batch: {self.micro_batch_tokens} tokens on one data-parallel rank, "
            f"at least {_count(self.micro_batch_tokens // self.max_sample_tokens, 'sample')} "
            f"of at most {self.max_sample_tokens} tokens"
        )
        if self.row:
            return f"step: {_count(self.prompts, self.row)}, {share}, in one optimizer step\n{micro_batch}"
        return (
            f"step: {_count(self.prompts, 'prompt')} × {_count(self.samples_per_prompt, 'sample')} = "
            f"{self.samples} samples, {share}\n"
            f"updates: {_count(self.mini_batches, 'mini-batch')} × {_count(self.epochs, 'epoch')} = "
            f"{_count(self.mini_batches * self.epochs, 'optimizer step')} of "
            f"{self.mini_batch_prompts * self.samples_per_prompt} samples\n"
            f"{micro_batch}"
        )

    @property
    def _prompt_multiple(self) -> int:
        """Prompts come in multiples of this, so that each data-parallel rank has equally many samples."""
        return self.layout.dp // gcd(self.layout.dp, self.samples_per_prompt)

    @property
    def _sample_multiple(self) -> int:
        """Context parallelism gives each rank two chunks of every sequence, one early and one late."""
        return 2 * self.layout.cp if self.layout.cp > 1 else 1

    def _mini_batch_problems(self) -> Iterator[str]:
        key, size = "actor.ppo_mini_batch_size", self.mini_batch_prompts
        shares_equally = self.samples % self.layout.dp == 0  # if not, data.train_batch_size has to change first
        multiple = self._prompt_multiple if shares_equally else 1
        working = [n for n in range(multiple, self.prompts + 1, multiple) if self.prompts % n == 0]
        below, above = [n for n in working if n < size], [n for n in working if n > size]
        nearest = [*below[-1:], *above[:1]]
        if size > self.prompts:
            yield f"{key} is {size} prompts, but data.train_batch_size is only {self.prompts}: set it to at most that."
        elif self.prompts % size:
            yield (
                f"{key} is {size} prompts, which does not divide data.train_batch_size {self.prompts}: {_use(nearest)}."
            )
        elif shares_equally and size * self.samples_per_prompt % self.layout.dp:
            yield self._uneven_share(key, size, nearest)

    def _uneven_share(self, key: str, prompts: int, nearest: list[int]) -> str:
        samples = prompts * self.samples_per_prompt
        count = f"{prompts} {self.row}s" if self.row else f"{prompts} prompts × rollout.n {self.samples_per_prompt}"
        return (
            f"{key}: {count}{'' if self.row else f' = {samples} samples'} cannot be shared equally by "
            f"{self.layout.dp} data-parallel ranks ({self.layout.describe()}): {_use(nearest)}."
        )


def _neighbours(number: int, multiple: int) -> list[int]:
    """The multiples next to a number that is none, without 0."""
    below = number // multiple * multiple
    return [value for value in (below, below + multiple) if value > 0]


def _count(number: int, noun: str) -> str:
    """`1 prompt`, `2 prompts`, `2 mini-batches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('batch') else 's'}"


def _use(numbers: list[int]) -> str:
    return f"the nearest that {'works is' if len(numbers) == 1 else 'work are'} {' and '.join(map(str, numbers))}"
