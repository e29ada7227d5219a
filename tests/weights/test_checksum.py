"""Checksums of weights: the polynomial of the docstring, and the faults that it promises to see."""

from __future__ import annotations

import pytest
import torch

from megarl.weights.checksum import _G, checksum, mismatches, with_checksums

DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def polynomial(tensor: torch.Tensor) -> int:
    """The docstring's sum, word by word in Python's integers."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    padded = data + bytes(-len(data) % 4)
    total, power = len(data), 1
    for start in range(0, len(padded), 4):
        power = power * _G % 2**64
        total += int.from_bytes(padded[start : start + 4], "little", signed=True) * power
    return total % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (0,), (300, 501)])  # the last is more than a block
def test_the_sum_is_the_polynomial(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert checksum(tensor) == polynomial(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_is_seen_wherever_it_is(dtype: torch.dtype) -> None:
    tensor = torch.zeros(70_001, dtype=dtype)
    right = checksum(tensor)
    raw = tensor.view(torch.uint8)
    for byte in (0, 1, 2, 3, raw.numel() // 2, raw.numel() - 2, raw.numel() - 1):
        for bit in range(8):
            raw[byte] = 1 << bit
            assert checksum(tensor) != right
        raw[byte] = 0


@pytest.mark.parametrize("distance", [1, 2, 3, 1024, 65_536, 131_072])
def test_two_elements_that_change_places_are_seen_even_if_only_their_signs_differ(distance: int) -> None:
    tensor = torch.ones(200_000, dtype=torch.bfloat16)
    tensor[5] = -1
    swapped = torch.ones_like(tensor)
    swapped[5 + distance] = -1
    assert checksum(tensor) != checksum(swapped)


def test_a_transposed_matrix_and_permuted_rows_are_seen() -> None:
    matrix = torch.randn(64, 64)
    assert len({checksum(matrix), checksum(matrix.T), checksum(matrix.flip(0)), checksum(matrix.roll(1, 0))}) == 4


def test_strides_and_offset_in_memory_do_not_matter() -> None:
    matrix = torch.randn(33, 17).to(torch.bfloat16)
    memory = torch.empty(33 * 17 + 1, dtype=torch.bfloat16)
    memory[1:] = matrix.flatten()
    assert checksum(matrix.T.contiguous().T) == checksum(matrix)
    assert checksum(memory[1:].view(33, 17)) == checksum(matrix)
    even = torch.randn(32, 16).to(torch.bfloat16)
    memory = torch.empty(32 * 16 + 1, dtype=torch.bfloat16)
    memory[1:] = even.flatten()
    assert checksum(memory[1:].view(32, 16)) == checksum(even)


def test_a_shorter_tensor_of_the_same_beginning_is_another() -> None:
    assert checksum(torch.zeros(4)) != checksum(torch.zeros(5))


def test_a_stream_is_cast_as_the_engine_holds_it_and_summed_as_it_passes() -> None:
    weights = {"a": torch.randn(5, 3), "bias": torch.randn(3)}
    dtypes = {"a": torch.bfloat16, "bias": torch.float32}
    sums: dict[str, int] = {}
    passed = dict(with_checksums(weights.items(), sums, dtypes.__getitem__))
    assert {name: tensor.dtype for name, tensor in passed.items()} == dtypes
    assert sums == {name: checksum(tensor.to(dtypes[name])) for name, tensor in weights.items()}


def test_what_differs_or_is_on_one_side_only_is_named() -> None:
    assert mismatches({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 4, "d": 5}) == ["b", "c", "d"]
    assert mismatches({"a": 1}, {"a": 1}) == []
