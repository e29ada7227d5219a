"""Reward models: scores that agree with preferences (Bradley–Terry), or with those of a larger reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megarl.algorithms.pairwise import bradley_terry_loss, centering_loss, kendall_tau, preference_kl
from megarl.config import ModelShape, RunConfig
from megarl.data.chat import load_chat_tokenizer
from megarl.data.packing import PackedBatch
from megarl.data.pairs import PairDataset, PairExample
from megarl.models.build import Role
from megarl.models.outputs import token_values
from megarl.models.pipeline import OutputFunction
from megarl.models.scores import SCORED, scored_column, scoring_pad_token_id, sequence_scores
from megarl.models.train import TrainableModel
from megarl.parallel.groups import Groups
from megarl.trainers.minibatch import Row
from megarl.trainers.setup import load_model, make_trainable
from megarl.trainers.supervised import Example, Task, run_supervised
from megarl.trainers.teacher import score_pairs, teacher_scores

MARGIN, TEACHER = "margin", "teacher"
"""Columns: the pair's margin and the teacher's score, at the scored token."""


class RewardModelTask(Task):
    """Pairs of responses to a prompt, of which one is to be scored higher."""

    title = "reward model"
    train_data: PairDataset
    val_data: PairDataset | None

    def __init__(self, config: RunConfig, groups: Groups) -> None:
        """Reads the files of the config and, with a teacher, has them scored. Collective over the world.

        Raises:
            ConfigError: see `PairDataset`, `load_chat_tokenizer` and `teacher_scores`.
        """
        chat = load_chat_tokenizer(config.model.path)
        self.config = config
        self.pad_token_id = scoring_pad_token_id(config.model.path)
        self.train_data = PairDataset(config.data.train_files, chat, config.data)
        self.val_data = PairDataset(config.data.val_files, chat, config.data) if config.data.val_files else None
        self.columns = (SCORED, MARGIN)
        self.metrics = ("loss", "accuracy", "margin", "chosen_score", "rejected_score")
        self.teacher: dict[PairDataset, torch.Tensor] = {}
        if config.reward_model.teacher is not None:
            self.columns += (TEACHER,)
            self.metrics += ("regression", "kl_to_teacher", "agreement_with_teacher")
            self.teacher[self.train_data] = teacher_scores(config, groups, "train", self.train_data, chat)
            if self.val_data is not None:
                self.teacher[self.val_data] = teacher_scores(config, groups, "val", self.val_data, chat)

    def examples(self, data: PairDataset, indices: Sequence[int]) -> list[Example]:
        pairs = data.examples(list(indices))
        teacher = self.teacher[data][list(indices)] if self.teacher else torch.zeros(len(pairs), 2)
        return [
            Example(rows=self._rows(pair, *scores), weight=1.0)
            for pair, scores in zip(pairs, teacher.tolist(), strict=True)
        ]

    def _rows(self, pair: PairExample, teacher_chosen: float, teacher_rejected: float) -> tuple[Row, Row]:
        def row(token_ids: list[int], teacher: float) -> Row:
            ids = torch.tensor(token_ids)
            scored = scored_column(ids, self.pad_token_id)
            columns = {SCORED: scored, MARGIN: pair.margin * scored, TEACHER: teacher * scored}
            return Row(token_ids=ids, first_target=ids.numel(), columns=columns)

        return row(pair.chosen.token_ids, teacher_chosen), row(pair.rejected.token_ids, teacher_rejected)

    def output_function(self, model: TrainableModel, total: float) -> OutputFunction:
        names, group = self.columns[1:], model.model.groups.cp

        def pair_loss(values: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
            per_token = torch.stack([token_values(values), *(shard.columns[name] for name in names)], dim=1)
            numbers = sequence_scores(per_token, shard, group)
            # Rows are chosen, rejected, chosen, …
            scores, *columns = numbers.view(len(numbers) // 2, 2, numbers.size(1)).unbind(dim=2)
            loss, sums = self.loss(scores, **dict(zip(names, columns, strict=True)))
            # Every context-parallel rank has all pairs of the pack: each gives its share.
            share = 1.0 / group.size()
            handed_back = {name: share * value.detach() for name, value in sums.items()}
            return share * loss / total, {"sums": handed_back, "count": share * len(scores)}

        return pair_loss

    def loss(
        self, scores: torch.Tensor, margin: torch.Tensor, teacher: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of some pairs, and their metrics, all summed over pairs.

        Args:
            scores, margin, teacher: [pairs, 2], of the chosen and of the rejected response.
        """
        settings = self.config.reward_model
        chosen, rejected = scores.unbind(dim=1)
        gap = chosen - rejected
        loss = settings.pairwise_weight * bradley_terry_loss(chosen, rejected, margin[:, 0])
        loss = loss + settings.centering_coef * centering_loss(chosen, rejected)
        metrics = {"accuracy": gap > 0, "margin": gap, "chosen_score": chosen, "rejected_score": rejected}
        if teacher is not None:
            regression = (scores - teacher).square().mean(dim=1)
            loss = loss + settings.regression_weight * regression
            teacher_gap = teacher[:, 0] - teacher[:, 1]
            metrics |= {
                "regression": regression,
                "kl_to_teacher": preference_kl(teacher_gap, gap),
                "agreement_with_teacher": gap.sign() == teacher_gap.sign(),
            }
        return loss.sum(), {"loss": loss.sum(), **{name: value.float().sum() for name, value in metrics.items()}}

    def held_out_metrics(self, model: TrainableModel) -> dict[str, float]:
        """With a teacher: Kendall's τ between the scores of all held-out responses, whichever prompt they answer."""
        if not self.teacher or self.val_data is None:
            return {}
        scores = score_pairs(
            model.model,
            self.val_data,
            ModelShape.from_hf(self.config.model.path),
            max_tokens=self.config.actor.max_tokens_per_micro_batch,
            pad_token_id=self.pad_token_id,
        )
        teacher = self.teacher[self.val_data]
        return {"val/kendall_tau_with_teacher": kendall_tau(scores.flatten().tolist(), teacher.flatten().tolist())}


def run_reward_model(config: RunConfig, groups: Groups) -> None:
    """Trains a reward model to the end of the run. Collective over the world.

    Raises:
        ConfigError: anything that a person has to put right.
    """
    task = RewardModelTask(config, groups)
    model = load_model(config, groups, role=Role.REWARD)
    run_supervised(config, groups, task, make_trainable(model, config))
