"""What a rank and an engine say to one another comes as it was said, and nothing else is taken for it."""

from __future__ import annotations

import math

import pytest

from megarl.rollout.sglang.messages import Abort, Answer, Call, Draw, Drawn, Hello, Refused, decode, encode

MESSAGES = [
    Hello(facts={"model.dtype": "float32", "rollout.tensor_model_parallel_size": 2}),
    Draw(key=3, prompt_ids=[1, 2], sampling={"top_p": 0.1}, is_cut=True, routed_experts=False),
    Drawn(
        key=3,
        token_ids=[7, 8],
        logprobs=[-0.1234567890123456, -1e-300],
        finish_reason="stop",
        weight_versions=[[0, "1"], [1, "2"]],
        routed_experts="AAAA",
    ),
    Refused(key=3, reason="ä"),
    Abort(),
    Call(number=1, method="update_weights", arguments={"checksums": {"w": 2**64 - 1}}),
    Answer(number=1, problem=None),
]


def test_messages_come_as_they_were_sent() -> None:
    assert decode(encode(MESSAGES)) == MESSAGES


def test_a_log_prob_that_is_not_finite_comes_through_to_be_named() -> None:
    drawn = Drawn(
        key=0, token_ids=[1], logprobs=[math.nan], finish_reason="stop", weight_versions=[], routed_experts=None
    )
    (arrived,) = decode(encode([drawn]))
    assert isinstance(arrived, Drawn) and math.isnan(arrived.logprobs[0])


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1", b"\xff\x00", b'[["Call", {}]]', b'[["Popen", {}]]', b"[1]", b"{}}", b"[" * 100_000]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="these are no messages of an engine"):
        decode(data)
