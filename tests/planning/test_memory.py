"""What a run holds by phase: which models count, what the engine's cache takes, and what is gone when."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.schema import RunConfig
from megarl.planning.memory import GIB, Bytes, Item, MemoryPlan, Phase, describe_peak, models_of, plan_memory
from tests.planning.model_configs import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, write_model


def config_of(folder: Path, values: dict, *, engine_ranks: int = 8) -> RunConfig:
    config = RunConfig()
    config.model.path = str(write_model(folder, values))
    config.data.max_prompt_length, config.data.max_response_length = 1024, 3072
    config.actor.max_tokens_per_micro_batch = 8192
    config.rollout.engine, config.rollout.tensor_model_parallel_size = "sglang", engine_ranks
    return config


def memory_of(config: RunConfig, gpus: int, *, gib: float = 80) -> MemoryPlan:
    return plan_memory(config, gpus, gib * GIB, micro_batches=8)


def test_a_token_of_llama_70b_takes_40_kib_of_each_of_eight_engine_ranks(tmp_path: Path) -> None:
    kv = memory_of(config_of(tmp_path, LLAMA_70B), 64).kv
    assert kv is not None
    assert kv.sequence_bytes == 4096 * 80 * 2 * 128 * 2  # keys and values of one of eight heads, in bfloat16


@pytest.mark.parametrize("ranks", [1, 16])
def test_a_token_of_deepseek_v3_takes_70_kb_of_every_engine_rank(tmp_path: Path, ranks: int) -> None:
    """The paper's figure for the latent of 512 and the rotated key of 64 in 61 layers (arXiv:2412.19437)."""
    kv = memory_of(config_of(tmp_path, DEEPSEEK_V3, engine_ranks=ranks), 512).kv
    assert kv is not None
    assert kv.sequence_bytes == 4096 * 61 * (512 + 64) * 2


def test_more_engine_ranks_than_key_value_heads_hold_a_head_each(tmp_path: Path) -> None:
    eight, sixteen = (memory_of(config_of(tmp_path, LLAMA_8B, engine_ranks=n), 16).kv for n in (8, 16))
    assert eight is not None and sixteen is not None
    assert sixteen.sequence_bytes == eight.sequence_bytes


def test_servers_take_nothing_of_the_trainers_gpus_but_buckets_do(tmp_path: Path) -> None:
    config = config_of(tmp_path, LLAMA_8B)
    config.rollout.servers = ["node7:30000", "node8:30000"]
    plan = memory_of(config, 8)
    assert plan.kv is None and plan.has_servers and Phase.ROLLOUT not in plan.worst.phases
    assert not any({Item.ENGINE, Item.KV_CACHE} & {item for item in held if held[item]} for held in phases_of(plan))
    assert plan.worst.phases[Phase.SYNC][Item.BUFFERS] > 0
    assert any("rollout.servers have GPUs of their own" in line for line in describe_peak(plan))


def phases_of(plan: MemoryPlan) -> list[Bytes]:
    return [held for stage in plan.stages for held in stage.phases.values()]


def test_sglang_takes_what_is_left_and_the_transformers_engine_all_it_was_promised(tmp_path: Path) -> None:
    config = config_of(tmp_path, LLAMA_8B, engine_ranks=1)
    sglang = memory_of(config, 8)
    assert sglang.kv is not None
    left = 80 * GIB - sglang.worst.total(Phase.ROLLOUT) + sglang.kv.sequence_bytes
    assert sglang.kv.given == pytest.approx(min(left, sglang.kv.wanted))
    config.rollout.engine = "transformers"
    transformers = memory_of(config, 8)
    assert transformers.kv is not None
    assert transformers.worst.phases[Phase.ROLLOUT][Item.KV_CACHE] == 64 * transformers.kv.sequence_bytes
    # Its weights and cache stay while the trainer works; SGLang gives both back.
    assert Item.ENGINE in transformers.worst.phases[Phase.UPDATE]
    assert Item.ENGINE not in sglang.worst.phases[Phase.UPDATE]


def test_ppo_holds_four_models_and_trains_two(tmp_path: Path) -> None:
    config = config_of(tmp_path / "actor", LLAMA_8B, engine_ranks=1)
    alone = memory_of(config, 8).worst.phases[Phase.UPDATE]
    config.algorithm.adv_estimator, config.algorithm.use_kl_in_reward = "gae", True
    config.reward.model.path = str(write_model(tmp_path / "reward", LLAMA_8B))
    assert [(model.name, model.trains) for model in models_of(config)] == [
        ("actor", True),
        ("critic", True),
        ("reference", False),
        ("reward model", False),
    ]
    all_four = memory_of(config, 8).worst.phases[Phase.UPDATE]
    output_layer = 128256 * 4096  # critic and reward model have none
    assert all_four[Item.WEIGHTS] == pytest.approx(4 * alone[Item.WEIGHTS] - 2 * 2 * output_layer, rel=1e-5)
    assert all_four[Item.GRADIENTS] == pytest.approx(2 * alone[Item.GRADIENTS] - 4 * output_layer, rel=1e-5)


def test_nothing_is_generated_where_responses_are_replayed(tmp_path: Path) -> None:
    config = config_of(tmp_path, LLAMA_8B)
    config.rollout.replay_dir = str(tmp_path)
    memory = memory_of(config, 8)
    assert memory.kv is None
    assert set(memory.worst.phases) == {Phase.LOAD, Phase.LOGPROBS, Phase.UPDATE}


def test_weights_are_there_twice_while_they_are_loaded(tmp_path: Path) -> None:
    """With 64 data-parallel ranks the optimizer is smaller than the copy, which is then the larger of the two."""
    memory = memory_of(config_of(tmp_path, LLAMA_8B, engine_ranks=1), 64)
    load, update = memory.worst.phases[Phase.LOAD], memory.worst.phases[Phase.UPDATE]
    assert load[Item.BUFFERS] == load[Item.WEIGHTS]
    assert load[Item.OPTIMIZER] == 0 < update[Item.OPTIMIZER]


def test_recomputation_trades_activations_for_time(tmp_path: Path) -> None:
    config = config_of(tmp_path, LLAMA_8B, engine_ranks=1)
    kept = {}
    for granularity in ("none", "selective", "full"):
        config.model.recompute_granularity = granularity
        kept[granularity] = memory_of(config, 8).worst.phases[Phase.UPDATE][Item.ACTIVATIONS]
    assert kept["full"] < 0.2 * kept["none"]
    assert kept["selective"] <= kept["none"]
