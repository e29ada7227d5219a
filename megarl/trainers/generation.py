"""This rank's part of a rollout: its engine generates, and graders score each response as it finishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from megarl.data.chat import ChatTokenizer
from megarl.data.sample import Prompt, Sample
from megarl.rewards.manager import RewardManager
from megarl.rollout.engine import Engine, Request, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How responses are drawn; `rollout.*` in training, `rollout.val_kwargs` in evaluation."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


def share_of(prompts: int, engines: int, engine: int) -> range:
    """Which of the step's prompts this engine answers: one after another, so that shares differ by one at most."""
    return range(engine, prompts, engines)


class Generator:
    """Generates and scores on this rank."""

    def __init__(self, engine: Engine, rewards: RewardManager, chat: ChatTokenizer, *, seed: int) -> None:
        self.engine = engine
        self.rewards = rewards
        self._chat = chat
        self._seed = seed

    def run(self, prompts: Sequence[tuple[int, Prompt]], sampling: Sampling, *, draw: int) -> list[Sample]:
        """Responses to this rank's prompts, scored.

        Args:
            prompts: (group, prompt): the group is the prompt's place among those of all ranks.
            draw: a number that no other call of the run has, such as the step; with the group it seeds the response,
                so that neither the layout nor the engine that answers decides what is drawn.

        Returns:
            All samples, ordered by group and index.
        """
        by_group = dict(prompts)
        for response in self.engine.generate(
            [self._request(group, prompt, sampling, draw) for group, prompt in prompts]
        ):
            self.rewards.submit(
                Sample(
                    prompt=by_group[response.request_id],
                    group=response.request_id,
                    index=response.index,
                    response_ids=response.token_ids,
                    response_mask=[1] * len(response.token_ids),
                    rollout_logprobs=response.logprobs,
                    finish_reason=str(response.finish_reason),
                    weight_version=response.weight_version,
                    response_text=self._chat.decode(response.token_ids),
                )
            )
        return sorted(self.rewards.collect(), key=lambda sample: (sample.group, sample.index))

    def _request(self, group: int, prompt: Prompt, sampling: Sampling, draw: int) -> Request:
        seed = numpy.random.SeedSequence([self._seed % 2**64, draw, group]).generate_state(1, numpy.uint64)
        return Request(
            request_id=group,
            prompt_ids=prompt.token_ids,
            sampling=SamplingParams(
                n=sampling.n,
                max_new_tokens=sampling.max_new_tokens,
                seed=int(seed[0] >> numpy.uint64(1)),
                stop_token_ids=self._chat.end_token_ids,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            ),
        )
