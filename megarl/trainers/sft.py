"""Supervised fine-tuning: the mean negative log-prob of what the assistant wrote, by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megarl.config import RunConfig
from megarl.data.chat import load_chat_tokenizer
from megarl.data.packing import PackedBatch
from megarl.data.sft import SftDataset
from megarl.models.outputs import token_logprobs
from megarl.models.pipeline import OutputFunction
from megarl.models.train import TrainableModel
from megarl.parallel.groups import Groups
from megarl.trainers.minibatch import Row
from megarl.trainers.setup import load_model, make_trainable
from megarl.trainers.supervised import Example, Task, run_supervised

MASK = "mask"
"""1 at positions whose next token is learned."""


class SftTask(Task):
    """Conversations, of which the assistant's turns are learned."""

    title = "SFT"
    columns = (MASK,)
    metrics = ("loss",)

    def __init__(self, config: RunConfig) -> None:
        """Reads the files of the config.

        Raises:
            ConfigError: see `SftDataset` and `load_chat_tokenizer`.
        """
        chat = load_chat_tokenizer(config.model.path)
        self.train_data = SftDataset(config.data.train_files, chat, config.data)
        self.val_data = SftDataset(config.data.val_files, chat, config.data) if config.data.val_files else None

    def examples(self, data: SftDataset, indices: Sequence[int]) -> list[Example]:
        return [
            # The first token is predicted from nothing; it is the assistant's where a conversation was cut there.
            Example(rows=(learned_row(each.token_ids, each.loss_mask),), weight=sum(each.loss_mask[1:]))
            for each in data.examples(list(indices))
        ]

    def output_function(self, model: TrainableModel, total: float) -> OutputFunction:
        def negative_logprob(logits: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
            logprobs, _ = token_logprobs(model.model, logits, shard)
            mask = shard.columns[MASK]
            loss = -torch.where(mask > 0, logprobs, 0.0).sum()
            return loss / total, {"sums": {"loss": loss.detach()}, "count": mask.sum()}

        return negative_logprob


def learned_row(token_ids: Sequence[int], loss_mask: Sequence[int]) -> Row:
    """A conversation with `MASK`. A token's mask stands where the token is predicted: one place earlier."""
    mask = torch.tensor([*loss_mask[1:], 0], dtype=torch.float32)
    first = next((i for i, learned in enumerate(loss_mask) if learned and i), len(token_ids))
    return Row(token_ids=torch.tensor(token_ids), first_target=first, columns={MASK: mask})


def run_sft(config: RunConfig, groups: Groups) -> None:
    """Runs SFT to its end. Collective over the world.

    Raises:
        ConfigError: anything that a person has to put right.
    """
    task = SftTask(config)
    run_supervised(config, groups, task, make_trainable(load_model(config, groups), config))
