"""Log-probs and entropy from vocabulary shards, compared with torch's log_softmax and its autograd."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.logprobs import vocab_parallel_logprobs_entropy
from tests.spawn import run_ranks

FLOAT32_TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


def _inputs(tokens: int = 37, columns: int = 100, vocab_size: int = 100, scale: float = 3.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "logits": torch.randn(tokens, columns, generator=generator) * scale,
        "targets": torch.randint(0, vocab_size, (tokens,), generator=generator),
        "weight_logprobs": torch.randn(tokens, generator=generator),
        "weight_entropy": torch.randn(tokens, generator=generator),
    }


def _reference(inputs: dict[str, Tensor], vocab_size: int, temperature: float = 1.0) -> dict[str, Tensor]:
    """The textbook formulas in float64, gradient by autograd."""
    leaf = inputs["logits"].double().requires_grad_()
    log_p = (leaf[:, :vocab_size] / temperature).log_softmax(-1)
    logprobs = log_p.gather(1, inputs["targets"][:, None])[:, 0]
    entropy = torch.distributions.Categorical(logits=log_p).entropy()
    loss = (logprobs * inputs["weight_logprobs"]).sum() + (entropy * inputs["weight_entropy"]).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "gradient": gradient}


def _ours(inputs: dict[str, Tensor], **settings: object) -> dict[str, Tensor]:
    leaf = inputs["logits"].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs_entropy(leaf.clone(), inputs["targets"], **settings)
    loss = (logprobs * inputs["weight_logprobs"]).sum() + (entropy * inputs["weight_entropy"]).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "gradient": gradient}


def _assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    for name, value in expected.items():
        limits = tolerance or FLOAT32_TOLERANCE
        torch.testing.assert_close(
            ours[name].double(), value.double(), **limits, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("vocab_size", [100, 89])
def test_values_and_gradients_agree_with_float64_autograd(temperature: float, vocab_size: int) -> None:
    inputs = _inputs(vocab_size=vocab_size)
    ours = _ours(inputs, vocab_size=vocab_size, temperature=temperature)
    _assert_same(ours, _reference(inputs, vocab_size, temperature))
    assert ours["logprobs"].dtype == ours["entropy"].dtype == torch.float32


def test_padded_columns_get_a_zero_gradient_whatever_they_hold() -> None:
    inputs = _inputs(vocab_size=89)
    expected = _ours(inputs, vocab_size=89)
    inputs["logits"][:, 89:] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30]).repeat(3)[:11]
    ours = _ours(inputs, vocab_size=89)
    _assert_same(ours, expected, rtol=0.0, atol=0.0)
    assert not ours["gradient"][:, 89:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    inputs = _inputs()
    inputs["logits"] = inputs["logits"].to(dtype)
    ours, expected = _ours(inputs, vocab_size=100), _reference(inputs, 100)
    assert ours["gradient"].dtype == dtype
    # The values see no rounding at all; the gradient is rounded once, when it is stored.
    _assert_same({k: ours[k] for k in ("logprobs", "entropy")}, {k: expected[k] for k in ("logprobs", "entropy")})
    torch.testing.assert_close(ours["gradient"], expected["gradient"].to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_each_gradient_alone_agrees_with_autograd() -> None:
    for silent in ("weight_entropy", "weight_logprobs"):
        inputs = _inputs()
        inputs[silent] = torch.zeros_like(inputs[silent])
        expected = _reference(inputs, 100)["gradient"]
        leaf = inputs["logits"].clone().requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs_entropy(leaf.clone(), inputs["targets"], vocab_size=100)
        # The other output takes no part in the loss, so backward is handed None for it.
        value, weight = (logprobs, "weight_logprobs") if silent == "weight_entropy" else (entropy, "weight_entropy")
        (gradient,) = torch.autograd.grad((value * inputs[weight]).sum(), leaf)
        torch.testing.assert_close(gradient.double(), expected, **FLOAT32_TOLERANCE)


def test_without_entropy_the_logprobs_and_their_gradient_are_the_same() -> None:
    inputs = _inputs()
    inputs["weight_entropy"] = torch.zeros(37)
    leaf = inputs["logits"].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs_entropy(leaf.clone(), inputs["targets"], vocab_size=100, entropy=False)
    assert entropy is None
    (gradient,) = torch.autograd.grad((logprobs * inputs["weight_logprobs"]).sum(), leaf)
    expected = _reference(inputs, 100)
    torch.testing.assert_close(logprobs.detach().double(), expected["logprobs"], **FLOAT32_TOLERANCE)
    torch.testing.assert_close(gradient.double(), expected["gradient"], **FLOAT32_TOLERANCE)


def test_logits_of_ten_thousand_lose_no_digits() -> None:
    # Representable neighbours near 1e4 are 1e-3 apart: only `subtract first, then scale` keeps their difference.
    inputs = _inputs()
    for offset in (1e4, -1e4):
        shifted = dict(inputs, logits=inputs["logits"] + offset)
        _assert_same(_ours(shifted, vocab_size=100, temperature=0.7), _reference(shifted, 100, 0.7))


def test_one_certain_token_among_hopeless_ones() -> None:
    inputs = _inputs(tokens=2)
    inputs["logits"] = torch.full((2, 100), -1e4)
    inputs["logits"][:, 3] = 1e4
    inputs["targets"] = torch.tensor([3, 4])
    ours = _ours(inputs, vocab_size=100)
    assert ours["logprobs"].tolist() == [0.0, -2e4]
    assert ours["entropy"].tolist() == [0.0, 0.0]
    assert ours["gradient"].isfinite().all()


def test_tokens_forbidden_with_minus_infinity_count_nothing() -> None:
    inputs = _inputs()
    inputs["targets"] %= 50
    inputs["logits"][:, 50:] = -float("inf")
    allowed = dict(inputs, logits=inputs["logits"][:, :50].contiguous())
    ours, expected = _ours(inputs, vocab_size=100), _reference(allowed, 50)
    _assert_same({k: ours[k] for k in ("logprobs", "entropy")}, {k: expected[k] for k in ("logprobs", "entropy")})
    torch.testing.assert_close(ours["gradient"][:, :50].double(), expected["gradient"], **FLOAT32_TOLERANCE)
    assert not ours["gradient"][:, 50:].any()


def test_a_nan_logit_is_not_hidden() -> None:
    inputs = _inputs()
    inputs["logits"][5, 20] = float("nan")
    logprobs, entropy = vocab_parallel_logprobs_entropy(inputs["logits"], inputs["targets"], vocab_size=100)
    for values in (logprobs, entropy):
        assert values.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("chunk_tokens", [1, 5, 36, 37, 1000])
def test_the_chunk_size_does_not_change_the_result(chunk_tokens: int) -> None:
    # Up to the last bits: torch rounds exp2 of an element that fills no vector register differently.
    inputs = _inputs(vocab_size=89)
    whole = _ours(inputs, vocab_size=89, chunk_bytes=10**9)
    _assert_same(_ours(inputs, vocab_size=89, chunk_bytes=4 * 89 * chunk_tokens), whole, rtol=1e-6, atol=1e-7)


def test_no_tokens_give_empty_results_and_an_empty_gradient() -> None:
    ours = _ours(_inputs(tokens=0), vocab_size=100)
    assert [tuple(ours[name].shape) for name in ("logprobs", "entropy", "gradient")] == [(0,), (0,), (0, 100)]


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    inputs = _inputs()
    leaf = inputs["logits"].clone().requires_grad_()
    logits = leaf.clone()
    seen: list[int] = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    logprobs, _ = vocab_parallel_logprobs_entropy(logits, inputs["targets"], vocab_size=100)
    assert torch.equal(logits, inputs["logits"]), "the forward pass must leave the logits alone"
    logprobs.sum().backward()
    assert seen == [logits.data_ptr()]


def test_without_gradients_the_logits_are_untouched() -> None:
    inputs = _inputs()
    logits = inputs["logits"].clone()
    logprobs, entropy = vocab_parallel_logprobs_entropy(logits, inputs["targets"], vocab_size=100)
    assert torch.equal(logits, inputs["logits"])
    assert not logprobs.requires_grad and not entropy.requires_grad


def test_a_second_backward_pass_is_refused() -> None:
    inputs = _inputs()
    logits = inputs["logits"].requires_grad_().clone()
    logprobs, entropy = vocab_parallel_logprobs_entropy(logits, inputs["targets"], vocab_size=100)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwritten with their gradient by the first backward pass"):
        entropy.sum().backward()


def test_another_operation_that_still_needs_the_logits_is_noticed() -> None:
    inputs = _inputs()
    leaf = inputs["logits"].requires_grad_()
    logits = leaf.clone()
    squares = logits.square().sum()  # saves the logits for its own backward
    logprobs, _ = vocab_parallel_logprobs_entropy(logits, inputs["targets"], vocab_size=100)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (logprobs.sum() + squares).backward()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"targets": torch.tensor([0, 100])}, r"outside the vocabulary, \[0, 100\)"),
        ({"targets": torch.tensor([-100, 1])}, r"outside the vocabulary, \[0, 100\)"),
        ({"targets": torch.tensor([1])}, r"not \[2, 100\] and \[1\]"),
        ({"targets": torch.tensor([1, 2], dtype=torch.int32)}, "int64"),
        ({"logits": torch.zeros(100, 2).t()}, "contiguous"),
        ({"logits": torch.zeros(2, 100, requires_grad=True)}, "leaf"),
        ({"logits": torch.zeros(2, 100, dtype=torch.float64)}, "float64"),
        ({"vocab_size": 101}, "vocab_size is 101"),
        ({"temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_what_cannot_be_right_is_named(changes: dict[str, object], sentence: str) -> None:
    call = {"logits": torch.zeros(2, 100), "targets": torch.tensor([1, 2]), "vocab_size": 100, **changes}
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        vocab_parallel_logprobs_entropy(call.pop("logits"), call.pop("targets"), **call)


def _on_one_shard(cases: list[tuple[dict[str, Tensor], int]]) -> list[dict[str, Tensor]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for inputs, vocab_size in cases:
        mine = dict(inputs, logits=inputs["logits"].chunk(ranks, dim=1)[rank].contiguous())
        results.append(_ours(mine, vocab_size=vocab_size, temperature=0.8, group=dist.group.WORLD, chunk_bytes=2000))
    return results


def test_two_vocabulary_shards_give_what_one_gives() -> None:
    forbidden = _inputs(vocab_size=50)
    forbidden["logits"][:10, 50:] = -float("inf")  # rank 1 has nothing to offer these tokens
    forbidden["logits"][10:20, :50] += 1e4  # and nothing that matters for those
    cases = [
        (_inputs(), 100),
        (_inputs(vocab_size=89), 89),
        (_inputs(vocab_size=40), 40),  # rank 1 holds padding only
        (forbidden, 100),
        (_inputs(tokens=0), 100),
    ]
    by_rank = run_ranks(_on_one_shard, 2, cases)
    for (inputs, vocab_size), first, second in zip(cases, *by_rank, strict=True):
        assert torch.equal(first["logprobs"], second["logprobs"])
        assert torch.equal(first["entropy"], second["entropy"])
        joined = dict(first, gradient=torch.cat([first["gradient"], second["gradient"]], dim=1))
        _assert_same(joined, _ours(inputs, vocab_size=vocab_size, temperature=0.8))


def _with_a_wrong_vocabulary() -> None:
    inputs = _inputs(columns=50, vocab_size=50)
    vocab_parallel_logprobs_entropy(inputs["logits"], inputs["targets"], vocab_size=101, group=dist.group.WORLD)


def test_a_vocabulary_larger_than_all_shards_fails_on_every_rank() -> None:
    with pytest.raises(Exception, match="vocab_size is 101, but the logits of 2 rank"):
        run_ranks(_with_a_wrong_vocabulary, 2)
