"""Routing that Megatron-Core computes otherwise than transformers is refused, and padding is marked as such."""

from __future__ import annotations

import pytest
import torch

from megarl.config.errors import ConfigError
from megarl.config.layout import Layout
from megarl.data.packing import pack_sequences
from megarl.models.bridge import _family_settings
from tests.tiny_models import hf_config


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize(("normalised", "experts"), [(False, 2), (True, 1)])
def test_sigmoid_weights_that_megatron_would_normalise_otherwise_are_refused(
    family: str, normalised: bool, experts: int
) -> None:
    config = hf_config(family)
    config.norm_topk_prob, config.num_experts_per_tok = normalised, experts
    said = f"norm_topk_prob {normalised} with num_experts_per_tok {experts} is not supported for {family}"
    with pytest.raises(ConfigError, match=said):
        _family_settings(config)


def test_groups_that_megatron_would_rate_otherwise_are_refused() -> None:
    config = hf_config("deepseek_v3")
    config.n_routed_experts, config.n_group, config.topk_group, config.num_experts_per_tok = 16, 4, 2, 8
    with pytest.raises(ConfigError, match="rate a group by its best 4 experts, where the model means 2"):
        _family_settings(config)


@pytest.mark.parametrize("cp", [1, 2])
def test_padding_within_and_after_sequences_is_marked(cp: int) -> None:
    sequences = [torch.arange(5), torch.arange(6), torch.arange(1)]
    batch = pack_sequences(sequences, Layout(world_size=cp, cp=cp), num_tokens=24)
    assert torch.equal(batch.input_ids[~batch.is_padding], torch.cat(sequences))
    shards = [batch.shard(cp, rank) for rank in range(cp)]
    assert sum(int((~shard.is_padding).sum()) for shard in shards) == 12
    assert all(shard.is_padding.shape == shard.input_ids.shape for shard in shards)
