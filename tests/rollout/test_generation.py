"""What the transformers engine generates, compared with transformers' `generate` and plain forward passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.rollout import batch
from megarl.rollout.decoder import Decoder
from megarl.rollout.engine import FinishReason
from megarl.rollout.kv_cache import Prefix
from tests.rollout.helpers import (
    answers,
    engine_of,
    gather,
    prompts,
    reference_logits,
    reference_model,
    request,
)
from tests.tiny_models import DENSE, MOE, make_hf_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", DENSE + MOE)
def test_greedy_is_what_transformers_generates_with_refills_and_uneven_prompts(family: str, tmp_path: Path) -> None:
    folder = make_hf_model(family, tmp_path)
    model = reference_model(folder)
    requests = [
        request(index, prompt, n=2, max_new_tokens=4 + 3 * (index % 3), temperature=0.0)
        for index, prompt in enumerate(prompts())
    ]
    for (request_id, _), response in answers(engine_of(folder, max_num_seqs=3), requests).items():
        prompt = requests[request_id].prompt_ids
        expected = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=requests[request_id].sampling.max_new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert response.token_ids == expected[0, len(prompt) :].tolist()
        expected_logprobs = gather(reference_logits(model, prompt, response.token_ids), response.token_ids)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected_logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cut", [{}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.5}])
def test_logprobs_are_those_of_a_plain_forward_pass_under_the_same_cut(llama: Path, cut: dict) -> None:
    model = reference_model(llama)
    requests = [request(index, prompt, n=3, **cut) for index, prompt in enumerate(prompts())]
    for (request_id, _), response in answers(engine_of(llama), requests).items():
        logits = reference_logits(model, requests[request_id].prompt_ids, response.token_ids)
        logits = logits / cut.get("temperature", 1.0)
        if "top_k" in cut:
            logits = logits.masked_fill(logits < logits.topk(cut["top_k"]).values[:, -1:], float("-inf"))
        if "top_p" in cut:
            ordered, order = logits.softmax(-1).sort(descending=True)
            dropped = ordered.cumsum(-1) - ordered >= cut["top_p"]
            logits = logits.masked_fill(dropped.gather(1, order.argsort(-1)), float("-inf"))
        expected = gather(logits, response.token_ids)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=0)


def test_the_first_token_is_sampled_from_the_models_distribution(llama: Path) -> None:
    prompt = prompts()[0]
    times = 4_000
    responses = answers(engine_of(llama, max_num_seqs=512), [request(0, prompt, n=times, max_new_tokens=1)])
    counts = torch.bincount(torch.tensor([response.token_ids[0] for response in responses.values()]), minlength=262)
    expected = reference_logits(reference_model(llama), prompt, [0])[0].softmax(-1).double() * times
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum().view(1)]).double()
    expected = torch.cat([expected[common], expected[~common].sum().view(1)])
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), statistic / 2) > 1e-3


def test_the_same_seed_gives_the_same_response_whatever_else_is_in_the_batch(llama: Path) -> None:
    requests = [
        request(index, prompt, n=3, seed=100 + index, max_new_tokens=5 + 2 * index, top_p=0.9 if index % 2 else 1.0)
        for index, prompt in enumerate(prompts())
    ]
    tokens = {place: r.token_ids for place, r in answers(engine_of(llama, max_num_seqs=64), requests).items()}
    for max_num_seqs, chosen in ((1, requests), (4, requests[::-1]), (5, requests[2:4]), (64, requests[1:])):
        engine = engine_of(llama, max_num_seqs=max_num_seqs)
        for place, response in answers(engine, chosen).items():
            assert response.token_ids == tokens[place]
    assert len({tuple(tokens[5, index]) for index in range(3)}) == 3  # samples of one prompt differ
    other = answers(engine_of(llama), [request(5, requests[5].prompt_ids, n=3, seed=7, max_new_tokens=15)])
    assert other[5, 0].token_ids != tokens[5, 0]


def test_a_call_after_a_longer_one_reads_nothing_that_it_left(llama: Path) -> None:
    engine = engine_of(llama, max_num_seqs=4)
    small = [request(0, prompts()[2], n=2)]
    alone = answers(engine_of(llama, max_num_seqs=4), small)
    answers(engine, [request(index, prompt, n=4, max_new_tokens=60) for index, prompt in enumerate(prompts())])
    assert answers(engine, small) == alone
    larger = [request(0, prompts()[3], n=4, max_new_tokens=100)]  # and the cache grows where it must
    assert answers(engine, larger) == answers(engine_of(llama, max_num_seqs=4), larger)


def test_a_stop_token_ends_a_response_and_is_its_last_token(llama: Path) -> None:
    prompt = prompts()[0]
    free = answers(engine_of(llama), [request(0, prompt, n=4, max_new_tokens=20)])
    stops = (free[0, 0].token_ids[0], free[0, 1].token_ids[7], free[0, 2].token_ids[3])
    stopped = answers(engine_of(llama), [request(0, prompt, n=4, max_new_tokens=20, stop_token_ids=stops)])
    for place, response in free.items():
        at = next((at for at, token in enumerate(response.token_ids) if token in stops), None)
        assert stopped[place].token_ids == response.token_ids[: None if at is None else at + 1]
        assert stopped[place].finish_reason == ("length" if at is None else "stop")
        assert len(stopped[place].logprobs) == len(stopped[place].token_ids)
    assert len(stopped[0, 0].token_ids) == 1  # stopped before it ever took part in a decoding step


def test_max_new_tokens_is_each_requests_own_and_one_is_enough(llama: Path) -> None:
    requests = [request(index, prompt, max_new_tokens=1 + 5 * index) for index, prompt in enumerate(prompts())]
    for (request_id, _), response in answers(engine_of(llama, max_num_seqs=2), requests).items():
        assert len(response.token_ids) == 1 + 5 * request_id
        assert response.finish_reason is FinishReason.LENGTH


def test_responses_come_out_as_they_finish(llama: Path) -> None:
    requests = [request(0, prompts()[0], max_new_tokens=50), request(1, prompts()[1], max_new_tokens=2)]
    assert [response.request_id for response in engine_of(llama).generate(requests)] == [1, 0]


def test_prompts_that_exceed_one_prefill_are_split_and_each_is_prefilled_once(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(index, prompt, n=2) for index, prompt in enumerate(prompts())]
    whole = answers(engine_of(llama, max_num_seqs=12), requests)
    monkeypatch.setattr(batch, "PREFILL_TOKENS", 20)
    prefill, lengths = Decoder.prefill, []

    def recorded(self: Decoder, prompts: list[list[int]]) -> list[Prefix]:
        lengths.append([len(prompt) for prompt in prompts])
        return prefill(self, prompts)

    monkeypatch.setattr(Decoder, "prefill", recorded)
    split = answers(engine_of(llama, max_num_seqs=12), requests)
    assert lengths == [[17], [9, 9], [5, 3, 1]]
    assert {place: r.token_ids for place, r in split.items()} == {place: r.token_ids for place, r in whole.items()}


def test_bfloat16_follows_float32_within_its_rounding(llama: Path) -> None:
    model = reference_model(llama)
    requests = [request(index, prompt, n=2) for index, prompt in enumerate(prompts())]
    for (request_id, _), response in answers(engine_of(llama, dtype=torch.bfloat16), requests).items():
        logits = reference_logits(model, requests[request_id].prompt_ids, response.token_ids)
        gap = torch.tensor(response.logprobs) - gather(logits, response.token_ids)
        assert gap.abs().max() < 0.2
        assert gap.abs().mean() < 0.05


def test_abort_hands_out_what_there_is_and_the_engine_goes_on_working(llama: Path) -> None:
    engine = engine_of(llama, max_num_seqs=3)
    requests = [request(index, prompt, n=2, max_new_tokens=30) for index, prompt in enumerate(prompts())]
    requests[0] = request(0, prompts()[3], n=1, max_new_tokens=4)
    whole = answers(engine, requests)
    responses = []
    for response in engine.generate(requests):
        if not responses:
            engine.abort()
        responses.append(response)
    assert len(responses) == len(whole)
    aborted = [response for response in responses if response.finish_reason == "abort"]
    assert len(aborted) == len(responses) - 1
    assert {len(response.token_ids) for response in aborted} == {0, 4}  # waiting, or as far as the first had come
    for response in aborted:
        expected = whole[response.request_id, response.index].token_ids
        assert response.token_ids == expected[: len(response.token_ids)]
    assert answers(engine, requests) == whole


def test_an_iterator_that_is_closed_early_leaves_the_engine_free(llama: Path) -> None:
    engine = engine_of(llama)
    requests = [request(index, prompt) for index, prompt in enumerate(prompts())]
    whole = answers(engine, requests)
    iterator = engine.generate(requests)
    next(iterator)
    with pytest.raises(RuntimeError, match="another generate"):
        engine.generate(requests)
    iterator.close()
    engine.generate(requests)  # dropped before its first item
    assert answers(engine, requests) == whole


def test_no_requests_are_no_responses(llama: Path) -> None:
    assert list(engine_of(llama).generate([])) == []


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: [request(4, [])], "request 4 has an empty prompt"),
        (lambda: [request(4, [1, 262])], "request 4 has token 262, and the model's vocabulary is 0 … 261"),
        (lambda: [request(4, [-1])], "request 4 has token -1"),
        (lambda: [request(4, [1] * 100, max_new_tokens=29)], r"= 129 positions, and the model has 128 \(max_position"),
        (lambda: [request(4, [1]), request(4, [2])], "request 4 comes twice"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_at_once(llama: Path, make: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        engine_of(llama).generate(make())  # not advanced


def test_the_last_position_of_the_model_can_be_used(llama: Path) -> None:
    prompt = prompts([100])[0]
    response = answers(engine_of(llama), [request(0, prompt, max_new_tokens=28, temperature=0.0)])[0, 0]
    expected = gather(reference_logits(reference_model(llama), prompt, response.token_ids), response.token_ids)
    torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=0)
