"""Program: two optimizer steps of one global batch, in the layouts and for the models given; saves what came out.

Usage: torchrun … train_step.py MODELS_FOLDER RESULTS_FOLDER CASES_JSON
    ([{"name": …, "layout": {…}, "model_config": {…}, "replay": …, "per_micro_batch": …,
       "runs": [[model, distributed optimizer], …]}, …])

With `replay` the experts of `experts_to_replay` are chosen instead of those of the routers. `per_micro_batch` is how
many sequences are packed together.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config.layout import Layout
from megarl.config.schema_inputs import ModelConfig
from megarl.config.schema_learning import OptimConfig
from megarl.data.packing import IGNORED_TARGET, PackedBatch, pack_multiple, pack_sequences, padded_length
from megarl.models.bridge import read_hf_config
from megarl.models.build import MegatronModel, build_model, config_overrides
from megarl.models.outputs import token_logprobs
from megarl.models.router_losses import RouterLossWeights
from megarl.models.router_replay import for_routers, mixtures_of_rank
from megarl.models.train import TrainableModel, optimizer_config
from megarl.parallel.groups import Groups, build_groups
from megarl.weights.export_hf import ExportPlan, export_hf, plan_export
from megarl.weights.load_hf import load_hf
from tests.launch import LIMIT_S, end_at_the_time_limit

LENGTHS = (7, 24, 2, 13, 17, 9, 31, 5)
PER_MICRO_BATCH = 2
STEPS = 2


def global_batch(vocab: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in LENGTHS]


def experts_to_replay(length: int, mixtures: int, experts: int, topk: int) -> torch.Tensor:
    """int16 [length, mixtures, topk] of a sequence: any, and for every third token the router's own."""
    generator = torch.Generator().manual_seed(length)
    chosen = torch.rand(length, mixtures, experts, generator=generator).topk(topk).indices.to(torch.int16)
    chosen[2::3] = -1
    return chosen


def micro_batches(
    sequences: list[torch.Tensor], groups: Groups, size: int, experts: list[torch.Tensor] | None = None
) -> list[PackedBatch]:
    """This data-parallel rank's sequences, `size` to a pack; packs of padding where VPP needs more."""
    layout = groups.layout
    rows = range(groups.dp.rank(), len(sequences), layout.dp)
    parts = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
    if layout.vpp > 1:
        parts += [[]] * (-len(parts) % layout.pp)
    length = padded_length(max(LENGTHS) * size, pack_multiple(layout))
    packs = [
        pack_sequences(
            [sequences[row] for row in group],
            layout,
            rows=group,
            num_tokens=length,
            routed_experts=[experts[row] for row in group] if experts else None,
        )
        for group in parts
    ]
    return [for_routers(pack.shard(groups.cp.size(), groups.cp.rank()), groups) for pack in packs]


def run_case(
    folder: Path,
    groups: Groups,
    distributed_optimizer: bool,
    model_config: ModelConfig,
    replay: bool,
    per_micro_batch: int,
) -> dict:
    overrides = config_overrides(model_config)
    dtype = platform.parse_dtype(model_config.dtype)
    model = build_model(read_hf_config(folder), groups, dtype=dtype, overrides=overrides)
    load_hf(model, folder)
    trainable = TrainableModel(
        model,
        optimizer_config(
            # With Adam's usual eps of 1e-8 a gradient that is 0 but for rounding moves a weight as far as any other.
            OptimConfig(lr=1e-3, eps=1e-4, weight_decay=0.1, clip_grad=1.0),
            dtype,
            use_distributed_optimizer=distributed_optimizer,
        ),
        router_losses=RouterLossWeights(aux_loss=model_config.moe_aux_loss_coeff, z_loss=model_config.moe_z_loss_coeff),
    )
    # Not before: the distributed optimizer moves the weights into its own buffers.
    plan = plan_export(model)
    expert_biases = [name for name in plan.tensors if name.endswith("e_score_correction_bias")]
    sequences = global_batch(model.vocab_size)
    total = sum(len(sequence) - 1 for sequence in sequences)
    experts = replayed_experts(model, sequences) if replay else None
    batches = micro_batches(sequences, groups, per_micro_batch, experts)

    def negative_mean_logprob(logits: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict]:
        logprobs, entropy = token_logprobs(model, logits, shard, entropy=True)
        mask = shard.targets != IGNORED_TARGET
        # An entropy bonus too, so that its gradient is compared in every layout.
        loss = -(logprobs + 0.1 * entropy)[mask].sum() / total
        return loss, {"loss": loss.detach()}

    result: dict = {"losses": [], "grad_norms": [], "expert_biases": [], "routers": []}
    for step in range(STEPS):
        outputs = trainable.accumulate(batches, negative_mean_logprob, replay_experts=replay)
        result["routers"].append(trainable.router_metrics())
        loss = sum((output["loss"] for output in outputs), torch.zeros(()))
        dist.all_reduce(loss, group=groups.dp_cp)
        dist.broadcast(loss, src=dist.get_world_size() - 1)  # the last rank is on the last stage
        result["losses"].append(loss.item())
        if step == 0 and not distributed_optimizer:
            names = [name for name in plan.tensors if name not in expert_biases]
            result["grads"] = gradients(model, plan, names)
        updated, grad_norm, _ = trainable.optimizer.step()
        assert updated
        result["grad_norms"].append(float(grad_norm))
        result["expert_biases"].append({name: t.clone() for name, t in export_hf(model, plan, names=expert_biases)})
    result["weights"] = {name: tensor.clone() for name, tensor in export_hf(model, plan)}
    # As few micro-batches as virtual stages allow.
    broken = trainable.step(batches[: groups.layout.pp], lambda logits, shard: (logits.sum() * math.nan, {}))
    after = {name: tensor.clone() for name, tensor in export_hf(model, plan)}
    changed = [name for name, tensor in after.items() if not torch.equal(tensor, result["weights"][name])]
    result["broken_step"] = {"updated": broken.updated, "changed": changed}
    return result


def replayed_experts(model: MegatronModel, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the mixtures that this rank has."""
    config, mine = model.config, mixtures_of_rank(model)
    shape = (config.num_layers, config.num_moe_experts, config.moe_router_topk)
    return [experts_to_replay(len(sequence), *shape)[:, mine] for sequence in sequences]


def gradients(model: MegatronModel, plan: ExportPlan, names: list[str]) -> dict[str, torch.Tensor]:
    """The gradient under Hugging Face names: it takes the weights' place for one export."""
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    weights = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    exported = {name: tensor.clone() for name, tensor in export_hf(model, plan, names=names)}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return exported


def main() -> None:
    end_at_the_time_limit()
    logging.disable(logging.WARNING)
    models_folder, results_folder = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world_size = platform.init_distributed(LIMIT_S)
    for case in json.loads(sys.argv[3]):
        groups = build_groups(Layout(world_size=world_size, **case["layout"]))
        for model, distributed in case["runs"]:
            model_config = ModelConfig(**{"dtype": "float32", **case.get("model_config", {})})
            result = run_case(
                models_folder / model,
                groups,
                distributed,
                model_config,
                case.get("replay", False),
                case.get("per_micro_batch", PER_MICRO_BATCH),
            )
            if rank == 0:
                torch.save(result, results_folder / f"{case['name']}-{model}-{distributed}.pt")
    platform.shutdown_distributed()


if __name__ == "__main__":
    main()
