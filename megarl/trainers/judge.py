"""A reward model in RL: its score of each sample (`reward.model.path`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config import ConfigError, ModelShape, RunConfig
from megarl.data.chat import UnusableMessages, load_chat_tokenizer
from megarl.data.sample import Sample
from megarl.models.build import Role
from megarl.models.scores import scoring_pad_token_id
from megarl.parallel.groups import Groups
from megarl.trainers.scoring import score_everywhere
from megarl.trainers.setup import load_model


class Judge:
    """A sharded reward model.

    It reads each conversation as its own chat template writes it, as it was trained to (`trainer.kind: reward_model`),
    and not the actor's tokens: its tokenizer may be another one, and its template may go on after the end token.
    Longer ones than it can read are cut at their beginning.
    """

    def __init__(self, config: RunConfig, groups: Groups) -> None:
        """Loads the model of `reward.model.path`. Collective over the world.

        Raises:
            ConfigError: it cannot be loaded, or has several labels.
        """
        path = config.reward.model.path
        assert path is not None
        self._chat = load_chat_tokenizer(path, "reward.model.path")
        self._shape = ModelShape.from_hf(path)
        self._max_tokens = config.reward.model.max_tokens_per_micro_batch or config.actor.max_tokens_per_micro_batch
        self._max_length = min(self._shape.max_positions, self._max_tokens)
        self._pad_token_id = scoring_pad_token_id(path)
        self._groups = groups
        self._model = load_model(config, groups, role=Role.REWARD, path=path, needs_head=True)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Of this rank's samples. Collective over the world; ranks without samples take part."""
        mine = [torch.tensor(self._token_ids(sample), dtype=torch.int64) for sample in samples]
        everyones, first = _everyones_sequences(mine)
        found = score_everywhere(
            self._model, everyones, self._shape, max_tokens=self._max_tokens, pad_token_id=self._pad_token_id
        )
        if not found.isfinite().all():
            raise ConfigError(
                f"reward.model.path {self._chat.path} gives scores that are NaN or infinite, so its weights are "
                "broken: train or convert it again."
            )
        return found[first : first + len(mine)].tolist()

    def _token_ids(self, sample: Sample) -> list[int]:
        messages = [*sample.prompt.messages, {"role": "assistant", "content": sample.response_text}]
        try:
            text = self._chat.render(messages, generation_prompt=False)
        except UnusableMessages as error:
            raise RuntimeError(
                f"reward.model.path {self._chat.path}: its chat template refuses row {sample.prompt.row}: {error}"
            ) from None
        (ids,) = self._chat.encode([text])
        return [ids[place] for place in self._chat.last_positions(ids, self._max_length)]


def _everyones_sequences(mine: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """The sequences of all ranks in the order of ranks, and where this rank's begin. Collective over the world."""
    lengths: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lengths, [ids.numel() for ids in mine])
    totals = [sum(part) for part in lengths]
    device = platform.current().device
    padded = torch.zeros(max(totals), dtype=torch.int64, device=device)
    padded[: totals[dist.get_rank()]] = torch.cat([*mine, torch.zeros(0, dtype=torch.int64)]).to(device)
    parts = [torch.empty_like(padded) for _ in totals]
    dist.all_gather(parts, padded)
    sequences = [
        sequence
        for part, total, sizes in zip(parts, totals, lengths, strict=True)
        for sequence in part[:total].cpu().split(sizes)
    ]
    return sequences, sum(len(part) for part in lengths[: dist.get_rank()])
