"""This rank's part of a rollout: its engine generates, and graders score each response as it finishes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy

from megarl.data.chat import ChatTokenizer
from megarl.data.sample import Prompt, Sample
from megarl.rewards.manager import RewardManager
from megarl.rewards.outcome import SCORE
from megarl.rollout.engine import Request, SamplingParams
from megarl.trainers.engine_keeper import EngineKeeper
from megarl.trainers.judge import Judge

RULE, MODEL = "rule", "model"
"""Names of rewards beside `score`: its two parts, where a reward model judges too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How responses are drawn; `rollout.*` in training, `rollout.val_kwargs` in evaluation."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


def share_of(prompts: int, world_size: int, rank: int, engine_size: int = 1) -> range:
    """Which of the step's prompts this rank answers: one after another, so that shares differ by one at most.

    Args:
        engine_size: ranks that form one engine, of which the first gets what the engine answers.
    """
    if rank % engine_size:
        return range(0)
    return range(rank // engine_size, prompts, world_size // engine_size)


class Generator:
    """Generates and scores on this rank."""

    def __init__(
        self,
        engine: EngineKeeper | None,
        rewards: RewardManager | None,
        chat: ChatTokenizer,
        *,
        seed: int,
        judge: Judge | None = None,
        rule_weight: float = 1.0,
        judge_weight: float = 1.0,
    ) -> None:
        """A score is `rule_weight` · that of graders (`rewards`) + `judge_weight` · that of the reward model (`judge`).

        One of the two may be None, and then adds nothing. Without an engine there is `score` alone.
        """
        self.engine = engine
        self._rewards = rewards
        self._chat = chat
        self._seed = seed
        self._judge = judge
        self._rule_weight, self._judge_weight = rule_weight, judge_weight

    def run(self, prompts: Sequence[tuple[int, Prompt]], sampling: Sampling, *, draw: int) -> list[Sample]:
        """Responses to this rank's prompts, scored. Collective over the world.

        Args:
            prompts: (group, prompt): the group is the prompt's place among those of all ranks.
            draw: a number that no other call of the run has, such as the step; with the group it seeds the response,
                so that neither the layout nor the engine that answers decides what is drawn.

        Returns:
            All samples, ordered by group and index.
        """
        assert self.engine is not None
        by_group = dict(prompts)
        requests = [self._request(group, prompt, sampling, draw) for group, prompt in prompts]
        return self.score(
            Sample(
                prompt=by_group[response.request_id],
                group=response.request_id,
                index=response.index,
                response_ids=response.token_ids,
                response_mask=[1] * len(response.token_ids),
                rollout_logprobs=response.logprobs,
                finish_reason=str(response.finish_reason),
                weight_version=response.weight_version,
                weight_versions=[list(span) for span in response.weight_versions],
                response_text=self._chat.decode(response.token_ids),
                routed_experts=response.routed_experts,
            )
            for response in self.engine.generate(requests)
        )

    def score(self, responses: Iterable[Sample]) -> list[Sample]:
        """Scores samples as they come, in the graders' processes. Collective over the world with a reward model.

        Returns:
            All samples, ordered by group and index. Where a reward model judges, `rule` and `model` are the two parts.
        """
        if self._rewards is None:
            samples = [dataclasses.replace(sample, rewards={SCORE: 0.0}) for sample in responses]
        else:
            for sample in responses:
                self._rewards.submit(sample)
            samples = self._rewards.collect()
        samples.sort(key=lambda sample: (sample.group, sample.index))
        judged = [None] * len(samples) if self._judge is None else self._judge.scores(samples)
        for sample, verdict in zip(samples, judged, strict=True):
            rule = sample.rewards[SCORE]
            sample.rewards[SCORE] = self._rule_weight * rule
            if verdict is not None:
                sample.rewards |= {RULE: rule, MODEL: verdict}
                sample.rewards[SCORE] += self._judge_weight * verdict
        return samples

    def metrics(self) -> dict[str, float]:
        """What graders counted since the last call."""
        return {} if self._rewards is None else self._rewards.metrics()

    def close(self) -> None:
        """Ends the processes of graders and engine."""
        if self._rewards is not None:
            self._rewards.close()
        if self.engine is not None:
            self.engine.close()

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
