"""Program: builds models in the layouts given, takes a step, and reports what each rank really holds.

Usage: torchrun … ranks.py MODELS_FOLDER RESULTS_FILE CASES_JSON
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config.layout import Layout
from megarl.config.schema_inputs import ModelConfig
from megarl.config.schema_learning import OptimConfig
from megarl.data.packing import IGNORED_TARGET, PackedBatch, pack_sequences
from megarl.models.bridge import read_hf_config
from megarl.models.build import Role, build_model, config_overrides
from megarl.models.outputs import token_logprobs, token_values
from megarl.models.train import TrainableModel, optimizer_config
from megarl.parallel.groups import Groups, build_groups
from tests.launch import LIMIT_S, end_at_the_time_limit
from tests.planning.activation_meter import ActivationMeter


def micro_batches(case: dict[str, Any], vocab: int, groups: Groups) -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(3)
    sequences = [
        torch.randint(0, vocab, (case["sequence_tokens"],), generator=generator) for _ in range(case["sequences"])
    ]
    pack = pack_sequences(sequences, groups.layout)
    return [pack.shard(groups.cp.size(), groups.cp.rank())] * case["micro_batches"]


def run_case(models: Path, case: dict[str, Any], groups: Groups) -> dict[str, Any]:
    role, dtype = Role(case["role"]), getattr(torch, case["dtype"])
    overrides = config_overrides(ModelConfig(**case["recompute"]))
    model = build_model(read_hf_config(models / case["model"]), groups, role=role, dtype=dtype, overrides=overrides)
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.02)
    distributed = case["distributed_optimizer"]
    trainable = TrainableModel(model, optimizer_config(OptimConfig(), dtype, use_distributed_optimizer=distributed))

    def loss_of(output: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict]:
        if role is not Role.CAUSAL_LM:
            return token_values(output).sum() * 1e-3, {}
        logprobs, entropy = token_logprobs(model, output, shard, entropy=True)
        return -(logprobs + entropy)[shard.targets != IGNORED_TARGET].sum() * 1e-3, {}

    batches = micro_batches(case, model.vocab_size, groups)
    meter = ActivationMeter(parameter for chunk in model.chunks for parameter in chunk.parameters())
    with meter.measuring():
        trainable.accumulate(batches, loss_of)
    trainable.optimizer.step()
    buffers = [b for chunk in trainable.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return {
        "stage": groups.pp.rank(),
        "parameters": model.num_parameters(),
        "gradient_bytes": sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in buffers),
        "optimizer_bytes": optimizer_bytes(trainable, dtype),
        "activation_bytes": meter.peak,
        "left_over": meter.held,
    }


def optimizer_bytes(trainable: TrainableModel, dtype: torch.dtype) -> int:
    """Moments, and float32 copies of weights where these are not float32."""
    total = 0
    optimizer: Any = trainable.optimizer
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in inner.optimizer.state.values():
            total += sum(v.numel() * v.element_size() for v in state.values() if torch.is_tensor(v) and v.numel() > 1)
        if dtype is not torch.float32:
            masters = [p for group in inner.optimizer.param_groups for p in group["params"]]
            total += sum(master.numel() * master.element_size() for master in masters)
    return total


def main() -> None:
    end_at_the_time_limit()
    logging.disable(logging.WARNING)
    models, results_file = Path(sys.argv[1]), Path(sys.argv[2])
    _, world_size = platform.init_distributed(LIMIT_S)
    results = {}
    built, groups = None, None
    for case in json.loads(sys.argv[3]):
        if case["layout"] != built:  # cases of one layout stand together: its groups keep their threads
            built, groups = case["layout"], build_groups(Layout(world_size=world_size, **case["layout"]))
        assert groups is not None
        mine = run_case(models, case, groups)
        everyones: list[dict] = [{} for _ in range(world_size)]
        dist.all_gather_object(everyones, mine)
        results[case["name"]] = everyones
    if dist.get_rank() == 0:
        results_file.write_text(json.dumps(results))
    platform.shutdown_distributed()


if __name__ == "__main__":
    main()
