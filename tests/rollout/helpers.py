"""Prompts, requests and reference answers for the tests of engines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from megarl.rollout.engine import Request, Response, SamplingParams
from megarl.rollout.transformers_engine import TransformersEngine

PROMPT_LENGTHS = (5, 9, 1, 17, 3, 9)


def prompts(lengths: Iterable[int] = PROMPT_LENGTHS, vocab_size: int = 262) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def request(request_id: int, prompt_ids: list[int], **sampling: Any) -> Request:
    params = {"n": 1, "max_new_tokens": 8, "seed": request_id, "stop_token_ids": (), **sampling}
    return Request(request_id=request_id, prompt_ids=prompt_ids, sampling=SamplingParams(**params))


def engine_of(folder: Path, *, max_num_seqs: int = 4, dtype: torch.dtype = torch.float32) -> TransformersEngine:
    engine = TransformersEngine(folder, dtype=dtype, max_num_seqs=max_num_seqs)
    engine.load_folder(folder)
    return engine


def answers(engine: TransformersEngine, requests: list[Request]) -> dict[tuple[int, int], Response]:
    """All responses by (request id, index); each comes once."""
    responses = list(engine.generate(requests))
    by_place = {(response.request_id, response.index): response for response in responses}
    assert len(by_place) == len(responses) == sum(request.sampling.n for request in requests)
    return by_place


def reference_model(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logits(model: transformers.PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """[response tokens, vocabulary]: the logits that each token was drawn from, by one plain forward pass."""
    logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1]


def gather(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Log-softmax at the tokens, [tokens]."""
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
