"""Preference optimisation: DPO and its relatives, on responses whose log-probs under the reference are known."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megarl.algorithms.preference import (
    LabelledInputs,
    PairInputs,
    PreferenceOptions,
    Responses,
    kto_baseline,
    preference_loss,
)
from megarl.config import ConfigError, ModelShape, RunConfig
from megarl.config.schema_preference import PreferenceConfig
from megarl.data.chat import ChatTokenizer, load_chat_tokenizer
from megarl.data.labelled import LabelledData, LabelledExample, load_labelled, next_different
from megarl.data.packing import PackedBatch
from megarl.data.pairs import Conversation, PairDataset
from megarl.data.win_rates import read_win_rates
from megarl.models.build import MegatronModel
from megarl.models.outputs import token_logprobs
from megarl.models.pipeline import OutputFunction
from megarl.models.scores import sequence_sums
from megarl.models.train import TrainableModel
from megarl.parallel.groups import Groups
from megarl.trainers.minibatch import Row
from megarl.trainers.reference import reference_logprobs
from megarl.trainers.scoring import logprob_sums_everywhere
from megarl.trainers.setup import load_model, make_trainable
from megarl.trainers.sft import MASK, learned_row
from megarl.trainers.supervised import Example, Task, run_supervised

REFERENCE, WIN_RATE, DESIRABLE = "reference", "win_rate", "desirable"
"""Columns: numbers of a whole response, each at the place of its first token and 0 elsewhere."""

_EXAMPLES_AT_ONCE = 1024
"""Examples whose tokens are in memory at a time."""

CHOSEN, REJECTED = "rewards/chosen", "rewards/rejected"
"""TRL's names of the mean implicit rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLoss:
    """What a loss says about the responses of one micro-batch."""

    loss: torch.Tensor
    """Summed over examples; gets the gradient."""
    sums: dict[str, torch.Tensor]
    """Of each metric."""
    count: int
    """Examples."""
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the metrics that are not over all examples."""


class PreferenceTask(Task):
    """What losses over pairs and over labelled responses have in common."""

    train_data: Any
    val_data: Any
    numbers: tuple[str, ...]
    """The columns that hold numbers of responses."""

    def __init__(self, config: RunConfig, chat: ChatTokenizer) -> None:
        """Reads the files of the config.

        Raises:
            ConfigError: see the datasets of the tasks.
        """
        self.config = config
        self.title = config.preference.loss_type.upper()
        self.columns = (MASK, *self.numbers)
        self.loss = preference_loss.get(config.preference.loss_type)
        self.options = loss_options(config.preference)
        self.train_data = self.load(config.data.train_files, chat)
        self.val_data = self.load(config.data.val_files, chat) if config.data.val_files else None
        self.reference: dict[Any, torch.Tensor] = {}

    @abc.abstractmethod
    def load(self, files: Sequence[str], chat: ChatTokenizer) -> Any:
        """A dataset of these files."""

    @abc.abstractmethod
    def rows(self, data: Any, indices: Sequence[int]) -> list[tuple[Row, ...]]:
        """Of each example the sequences whose log-probs under the reference are needed, with the column `MASK`."""

    @abc.abstractmethod
    def summed_loss(self, logprobs: torch.Tensor, tokens: torch.Tensor, **numbers: torch.Tensor) -> BatchLoss:
        """The loss of a micro-batch.

        Args:
            logprobs, tokens, numbers: [sequences]: log-probs and lengths of the responses, and `self.numbers`.
        """

    def add_reference(self, model: MegatronModel) -> None:
        """Has the reference's log-probs computed, or finds them kept; before the weights move. Collective."""
        for name, data in (("train", self.train_data), ("val", self.val_data)):
            if data is not None:
                rows_of = lambda indices, data=data: self.rows(data, indices)
                self.reference[data], note = reference_logprobs(self.config, model, name, len(data), rows_of)
                self.notes = [*self.notes, *([note] if note else [])]

    def output_function(self, model: TrainableModel, total: float) -> OutputFunction:
        group = model.model.groups.cp

        def loss(logits: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
            logprobs, _ = token_logprobs(model.model, logits, shard)
            mask = shard.columns[MASK]
            per_token = torch.stack([logprobs, mask, *(shard.columns[name] for name in self.numbers)], dim=1)
            logprob_sums, tokens, *numbers = sequence_sums(per_token, mask, shard, group).unbind(dim=1)
            named = dict(zip(self.numbers, numbers, strict=True))
            found = self.summed_loss(logprob_sums, tokens, **named)
            # Every context-parallel rank has all responses of the pack: each gives its share.
            share = 1.0 / group.size()
            shared = lambda values: {name: share * value.detach() for name, value in values.items()}
            return share * found.loss / total, {
                "sums": shared({"loss": found.loss, **found.sums}),
                "counts": shared(found.counts),
                "count": share * found.count,
            }

        return loss


class PairTask(PreferenceTask):
    """Pairs of responses to a prompt, of which one is preferred."""

    numbers = (REFERENCE, WIN_RATE)
    metrics = ("loss", CHOSEN, REJECTED, "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected")

    def __init__(self, config: RunConfig, chat: ChatTokenizer) -> None:
        self.win_rates: dict[PairDataset, np.ndarray] = {}
        super().__init__(config, chat)

    def load(self, files: Sequence[str], chat: ChatTokenizer) -> PairDataset:
        data = PairDataset(files, chat, self.config.data)
        self.win_rates[data] = read_win_rates(files)
        return data

    def rows(self, data: PairDataset, indices: Sequence[int]) -> list[tuple[Row, ...]]:
        return [(_row(pair.chosen), _row(pair.rejected)) for pair in data.examples(list(indices))]

    def examples(self, data: PairDataset, indices: Sequence[int]) -> list[Example]:
        pairs, reference = data.examples(list(indices)), self.reference[data][list(indices)].tolist()
        examples = []
        for pair, logprobs in zip(pairs, reference, strict=True):
            sides = zip((pair.chosen, pair.rejected), logprobs, self.win_rates[data][pair.row].tolist(), strict=True)
            rows = tuple(_row(side, **{REFERENCE: logprob, WIN_RATE: rate}) for side, logprob, rate in sides)
            examples.append(Example(rows=rows, weight=1.0))
        return examples

    def summed_loss(self, logprobs: torch.Tensor, tokens: torch.Tensor, **numbers: torch.Tensor) -> BatchLoss:
        # Rows are chosen, rejected, chosen, …
        reference, win_rate = numbers[REFERENCE], numbers[WIN_RATE]
        chosen, rejected = (
            Responses(logprobs=logprobs[side::2], reference_logprobs=reference[side::2], tokens=tokens[side::2])
            for side in (0, 1)
        )
        inputs = PairInputs(
            chosen=chosen, rejected=rejected, chosen_win_rate=win_rate[0::2], rejected_win_rate=win_rate[1::2]
        )
        margin = self.options.beta * (chosen.log_ratio - rejected.log_ratio)
        sums = {
            CHOSEN: self.options.beta * chosen.log_ratio,
            REJECTED: self.options.beta * rejected.log_ratio,
            "rewards/accuracies": (margin > 0).float(),
            "rewards/margins": margin,
            "logps/chosen": chosen.logprobs,
            "logps/rejected": rejected.logprobs,
        }
        loss = self.loss(inputs, self.options).sum()
        return BatchLoss(loss=loss, sums={name: value.sum() for name, value in sums.items()}, count=len(margin))


class LabelledTask(PreferenceTask):
    """Single responses, each good or bad (KTO)."""

    train_data: LabelledData
    val_data: LabelledData | None
    numbers = (REFERENCE, DESIRABLE)
    metrics = ("loss", CHOSEN, REJECTED, "rewards/accuracies", "kl", "logps/chosen", "logps/rejected")

    def __init__(self, config: RunConfig, chat: ChatTokenizer) -> None:
        super().__init__(config, chat)
        labels = self.train_data.labels
        if labels.all() or not labels.any():
            raise ConfigError(
                f"{', '.join(config.data.train_files)}: '{config.data.label_key}' is {str(bool(labels[0])).lower()} in "
                f"all {len(labels)} usable rows, but {config.preference.loss_type} learns from good and bad responses: "
                "add the others."
            )
        self.partners = {data: _partners(data) for data in (self.train_data, self.val_data) if data is not None}
        self.kl = torch.zeros(())

    def load(self, files: Sequence[str], chat: ChatTokenizer) -> LabelledData:
        return load_labelled(files, chat, self.config.data)

    def rows(self, data: LabelledData, indices: Sequence[int]) -> list[tuple[Row, ...]]:
        """The response itself, and another prompt's response put behind this prompt."""
        examples = data.examples(list(indices))
        return [
            (_row(example.conversation), mismatched)
            for example, mismatched in zip(examples, self._mismatched(data, indices, examples), strict=True)
        ]

    def examples(self, data: LabelledData, indices: Sequence[int]) -> list[Example]:
        reference = self.reference[data][list(indices), 0].tolist()
        return [
            Example(
                rows=(_row(each.conversation, **{REFERENCE: logprob, DESIRABLE: float(each.desirable)}),), weight=1.0
            )
            for each, logprob in zip(data.examples(list(indices)), reference, strict=True)
        ]

    def begin_batch(self, data: LabelledData, indices: Sequence[int], model: TrainableModel) -> None:
        """Estimates the KL divergence from the mismatched responses of the whole batch."""
        mismatched = self._mismatched(data, indices, data.examples(list(indices)))
        logprobs = logprob_sums_everywhere(
            model.model,
            mismatched,
            MASK,
            ModelShape.from_hf(self.config.model.path),
            max_tokens=self.config.actor.max_tokens_per_micro_batch,
        )
        self.kl = kto_baseline(logprobs - self.reference[data][list(indices), 1])

    def summed_loss(self, logprobs: torch.Tensor, tokens: torch.Tensor, **numbers: torch.Tensor) -> BatchLoss:
        responses = Responses(logprobs=logprobs, reference_logprobs=numbers[REFERENCE], tokens=tokens)
        desirable = numbers[DESIRABLE] > 0
        kl = self.kl.to(logprobs.device)
        loss = self.loss(LabelledInputs(responses=responses, desirable=desirable, kl=kl), self.options).sum()
        rewards = self.options.beta * responses.log_ratio
        of_label = lambda values, label: torch.where(desirable == label, values, 0.0).sum()
        sums = {
            CHOSEN: of_label(rewards, True),
            REJECTED: of_label(rewards, False),
            # A response counts as told right where the loss's sigmoid is above one half.
            "rewards/accuracies": ((responses.log_ratio > kl) == desirable).float().sum(),
            "kl": kl * len(rewards),
            "logps/chosen": of_label(logprobs, True),
            "logps/rejected": of_label(logprobs, False),
        }
        good, bad = desirable.sum(), (~desirable).sum()
        counts = {CHOSEN: good, "logps/chosen": good, REJECTED: bad, "logps/rejected": bad}
        return BatchLoss(loss=loss, sums=sums, count=len(rewards), counts=counts)

    def _mismatched(self, data: LabelledData, indices: Sequence[int], examples: Sequence[LabelledExample]) -> list[Row]:
        """Each example's prompt with the response of its partner, cut at the end to the longest length."""
        limit = self.config.data.max_prompt_length + self.config.data.max_response_length
        others = data.examples(self.partners[data][list(indices)].tolist())
        rows = []
        for example, other in zip(examples, others, strict=True):
            prompt, _ = _split(example.conversation)
            _, (response, mask) = _split(other.conversation)
            rows.append(learned_row([*prompt, *response][:limit], [*([0] * len(prompt)), *mask][:limit]))
        return rows


def loss_options(config: PreferenceConfig) -> PreferenceOptions:
    """What losses read of the config."""
    return PreferenceOptions(
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
    )


def _row(conversation: Conversation, **numbers: float) -> Row:
    """A conversation with `MASK`, and columns that hold a number of the whole response at its first token."""
    row = learned_row(conversation.token_ids, conversation.loss_mask)
    columns = dict(row.columns)
    for name, number in numbers.items():
        columns[name] = torch.zeros_like(row.columns[MASK])
        columns[name][row.first_target - 1] = number
    return Row(token_ids=row.token_ids, first_target=row.first_target, columns=columns)


def _split(conversation: Conversation) -> tuple[list[int], tuple[list[int], list[int]]]:
    """The tokens of the prompt, and tokens and mask of what follows it."""
    start = conversation.loss_mask.index(1)
    return conversation.token_ids[:start], (conversation.token_ids[start:], conversation.loss_mask[start:])


def _partners(data: LabelledData) -> np.ndarray:
    """Whose response is put behind each example's prompt: that of the next example with another prompt, int64 [rows].

    Fixed for the run, so that the reference's log-probs of it are computed once. (The paper and TRL take the next
    response of the batch.)
    """
    prompts = [
        hash(tuple(_split(each.conversation)[0]))
        for start in range(0, len(data), _EXAMPLES_AT_ONCE)
        for each in data.examples(range(start, min(start + _EXAMPLES_AT_ONCE, len(data))))
    ]
    return next_different(prompts)


def train_on_preferences(
    config: RunConfig, groups: Groups, *, title: str | None = None, notes: Sequence[str] = ()
) -> None:
    """Trains the model of `model.path` on the pairs, or labelled responses, of `data.train_files`.

    Collective over the world.

    Args:
        title: of the run, for people; the name of the loss if not given.
        notes: for people, at the start of the run.

    Raises:
        ConfigError: anything that a person has to put right.
    """
    labelled = preference_loss.traits(config.preference.loss_type).labelled
    task = (LabelledTask if labelled else PairTask)(config, load_chat_tokenizer(config.model.path))
    task.title, task.notes = title or task.title, notes
    model = load_model(config, groups)
    task.add_reference(model)
    run_supervised(config, groups, task, make_trainable(model, config))
