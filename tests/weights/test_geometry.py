"""The geometry of the name map: shards of all ranks make up every tensor exactly once, as mbridge merges and splits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from mbridge.core.bridge import Bridge

from megarl.weights.boxes import box_index
from megarl.weights.geometry import Cut, parameter_pieces, uncovered

QKV = ["q", "k", "v"]


def fill(name: str, hf: dict[str, torch.Tensor], shape: tuple[int, ...], cut: Cut, **sizes: int) -> torch.Tensor:
    """One shard, put together from its pieces; elements that no piece fills are NaN."""
    shard = torch.full(shape, float("nan"))
    for piece in parameter_pieces(name, list(hf), shape, cut, **{**SIZES, **sizes}):
        assert piece.hf_shape == tuple(hf[piece.hf_name].shape)
        shard[box_index(piece.local_box)] = hf[piece.hf_name][box_index(piece.hf_box)]
    return shard


SIZES = {"vocab_size": 10, "query_heads": 8, "groups": 4}


def mbridge_merge(name: str, hf: dict[str, torch.Tensor], query_heads: int, groups: int, head: int) -> torch.Tensor:
    hidden = next(iter(hf.values())).shape[-1]
    config = SimpleNamespace(
        num_key_value_heads=groups, num_attention_heads=query_heads, head_dim=head, hidden_size=hidden
    )
    stand_in = SimpleNamespace(hf_config=config, dtype=None, make_vocab_size_divisible_by=None)
    return Bridge._weight_to_mcore_format(stand_in, name, list(hf.values()))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])  # 8: more ranks than key-value groups
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_qkv_shards_are_the_rows_that_mbridge_cuts(groups: int, ranks: int) -> None:
    heads, head, hidden = 8, 4, 6
    hf = {
        "q": torch.randn(heads * head, hidden),
        "k": torch.randn(groups * head, hidden),
        "v": torch.randn(groups * head, hidden),
    }
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    merged = mbridge_merge(name, hf, heads, groups, head)
    for rank, expected in enumerate(merged.chunk(ranks)):
        shard = fill(
            name,
            hf,
            tuple(expected.shape),
            Cut(rank, ranks, 0 if ranks > 1 else None),
            query_heads=heads,
            groups=groups,
        )
        assert torch.equal(shard, expected)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gated_shards_hold_their_gate_above_their_up_projection(ranks: int) -> None:
    hf = {"gate": torch.randn(8, 3), "up": torch.randn(8, 3)}
    for rank in range(ranks):
        shard = fill("mlp.linear_fc1.weight", hf, (16 // ranks, 3), Cut(rank, ranks, 0))
        assert torch.equal(shard, torch.cat([hf["gate"].chunk(ranks)[rank], hf["up"].chunk(ranks)[rank]]))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_vocabulary_rows_beyond_the_last_token_belong_to_no_tensor(ranks: int) -> None:
    hf = {"embed": torch.randn(10, 3)}
    rows = -(-10 // ranks)
    parts = [fill("embedding.word_embeddings.weight", hf, (rows, 3), Cut(rank, ranks, 0)) for rank in range(ranks)]
    whole = torch.cat(parts)
    assert torch.equal(whole[:10], hf["embed"])
    assert whole[10:].isnan().all()


def test_a_whole_parameter_is_one_piece_on_every_rank() -> None:
    hf = {"norm": torch.randn(5)}
    assert torch.equal(fill("final_layernorm.weight", hf, (5,), Cut(1, 4, None)), hf["norm"])


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 2), (0, 3)), ((2, 4), (0, 3))], None),
        ([((0, 4), (0, 2)), ((0, 4), (2, 3))], None),
        ([((0, 2), (0, 3))], "6 of 12 elements are missing"),
        ([((0, 2), (0, 3)), ((0, 4), (0, 3))], "6 elements come twice"),
        ([((0, 2), (0, 3)), ((0, 2), (0, 3))], "its pieces overlap"),
        ([((0, 2), (0, 3)), ((1, 3), (0, 3))], "its pieces overlap"),
    ],
)
def test_a_missing_doubled_or_misplaced_piece_is_named(boxes: list, problem: str | None) -> None:
    assert uncovered((4, 3), boxes) == problem
