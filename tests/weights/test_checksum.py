"""Checksums of weights: the polynomial of the docstring, and the faults that it promises to see."""

from __future__ import annotations

import itertools

import pytest
import torch

from megarl.weights.boxes import box_index
from megarl.weights.checksum import _G, box_checksum, checksum

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim", "edges"),
    [
        ((12, 10), 0, [0, 4, 8, 12]),
        ((12, 10), 1, [0, 4, 10]),
        ((12, 10), 1, [0, 3, 4, 9, 10]),  # words of 16-bit elements lie in two boxes
        ((7, 5), 0, [0, 1, 4, 7]),
        ((7, 5), 1, [0, 2, 5]),
        ((9,), 0, [0, 3, 9]),
        ((3, 140_000), 1, [0, 70_000, 140_000]),  # rows longer than a block
        ((3, 140_000), 0, [0, 1, 3]),
        ((500, 300), 1, [0, 100, 300]),  # more rows than one multiplication takes
    ],
)
def test_boxes_add_up_to_the_checksum_of_the_whole(
    shape: tuple[int, ...], dim: int, edges: list[int], dtype: torch.dtype
) -> None:
    whole = torch.randn(shape).to(dtype)
    total = 0
    for bounds in itertools.pairwise(edges):
        box = tuple(bounds if at == dim else (0, length) for at, length in enumerate(shape))
        total += box_checksum(whole[box_index(box)], box, shape)
    assert total % 2**64 == checksum(whole)


def test_boxes_that_change_places_are_seen() -> None:
    whole = torch.randn(4, 6)
    left, right = ((0, 4), (0, 3)), ((0, 4), (3, 6))
    swapped = box_checksum(whole[:, :3], right, (4, 6)) + box_checksum(whole[:, 3:], left, (4, 6))
    assert swapped % 2**64 != checksum(whole)
