"""The experts that the transformers engine reports are those that plain forward passes of transformers choose."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
import transformers

from megarl.rollout.engine import FinishReason
from megarl.rollout.transformers_engine import TransformersEngine
from tests.rollout.helpers import answers, engine_of, prompts, reference_model, request
from tests.tiny_models import MOE, make_hf_model


def reporting_engine(folder: Path) -> TransformersEngine:
    engine = TransformersEngine(folder, dtype=torch.float32, max_num_seqs=3, return_routed_experts=True)
    engine.load_folder(folder)
    return engine


@torch.no_grad()
def experts_of_a_plain_pass(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[tokens, mixtures, top-k], the experts of a token in ascending order."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).sort(dim=-1).values


@pytest.mark.parametrize("family", MOE)
def test_each_token_comes_with_its_experts_and_the_last_one_with_none(family: str, tmp_path: Path) -> None:
    folder = make_hf_model(family, tmp_path)
    model = reference_model(folder)
    requests = [
        request(index, prompt, n=2, max_new_tokens=1 + 3 * (index % 3)) for index, prompt in enumerate(prompts())
    ]
    for (request_id, _), response in answers(reporting_engine(folder), requests).items():
        found = response.routed_experts
        assert found is not None and found.dtype == numpy.int16
        expected = experts_of_a_plain_pass(model, [*requests[request_id].prompt_ids, *response.token_ids])
        assert found.shape == expected.shape
        assert (found[-1] == -1).all()
        assert torch.equal(torch.from_numpy(found[:-1]).long().sort(dim=-1).values, expected[:-1])


def test_aborted_responses_have_as_many_rows_as_tokens(tmp_path: Path) -> None:
    engine = reporting_engine(make_hf_model("qwen3_moe", tmp_path))
    requests = [
        request(index, prompt, max_new_tokens=2 if index == 3 else 30) for index, prompt in enumerate(prompts())
    ]
    aborted = []
    for response in engine.generate(requests):
        engine.abort()
        if response.finish_reason is FinishReason.ABORT:
            aborted.append(response)
    assert {len(response.token_ids) > 0 for response in aborted} == {True, False}
    for response in aborted:
        tokens = len(requests[response.request_id].prompt_ids) + len(response.token_ids)
        assert response.routed_experts is not None and response.routed_experts.shape == (tokens, 4, 2)
        assert (response.routed_experts >= 0).all(axis=(1, 2)).sum() in (0, tokens - 1)


def test_nothing_is_reported_unless_asked_for(tmp_path: Path) -> None:
    engine = engine_of(make_hf_model("qwen3_moe", tmp_path))
    assert all(response.routed_experts is None for response in engine.generate([request(0, [1, 2, 3], n=2)]))


def test_a_dense_model_has_no_experts_to_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no routers"):
        reporting_engine(make_hf_model("llama", tmp_path))
