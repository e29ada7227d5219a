"""Program: loads models in the layouts given, compares logits or values with transformers, and exports them again.

Usage: torchrun … parity.py MODELS_FOLDER RESULTS_FILE CASES_JSON
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from megarl import platform
from megarl.config.layout import Layout
from megarl.data.packing import PackedBatch, pack_sequences
from megarl.models.bridge import read_hf_config
from megarl.models.build import MegatronModel, Role, build_model
from megarl.models.pipeline import run_pipeline
from megarl.parallel.context import zigzag_positions
from megarl.parallel.groups import Groups, build_groups
from megarl.weights.export_hf import export_hf
from megarl.weights.load_hf import load_hf
from megarl.weights.safetensors_io import SafetensorsReader
from tests.launch import LIMIT_S, end_at_the_time_limit

LENGTHS = (7, 24, 1, 40)
AUTO_CLASS = {
    Role.CAUSAL_LM: transformers.AutoModelForCausalLM,
    Role.CRITIC: transformers.AutoModelForTokenClassification,
    Role.REWARD: transformers.AutoModelForSequenceClassification,
}


def whole_output(model: MegatronModel, batch: PackedBatch) -> torch.Tensor | None:
    """[tokens, vocabulary or 1] of the whole pack, on the last stage."""
    groups = model.groups
    # VPP wants as many micro-batches as stages.
    # Logits of every real token are compared, those without a next token too; `targets` says which are computed.
    shard = dataclasses.replace(batch, targets=torch.zeros_like(batch.targets))
    shard = shard.shard(groups.cp.size(), groups.cp.rank())
    batches = [shard] * (groups.layout.pp if groups.layout.vpp > 1 else 1)
    with torch.no_grad():
        outputs = run_pipeline(model, batches, lambda out, shard: (out.sum(), {"out": out}), forward_only=True)
    if not outputs:
        return None
    output = outputs[0]["out"]
    if model.role is Role.CAUSAL_LM:
        output = torch.cat(gathered(output, groups.tp), -1)
    if groups.layout.cp > 1:
        order = torch.cat([zigzag_positions(batch.bounds, groups.layout.cp, r) for r in range(groups.layout.cp)])
        output = torch.cat(gathered(output, groups.cp))[order.argsort()]
    return output


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def transformers_output(folder: Path, role: Role, sequence: torch.Tensor) -> torch.Tensor:
    model = AUTO_CLASS[role].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        if role is Role.REWARD:  # transformers gives the last token's score only
            hidden = model.model(sequence[None]).last_hidden_state
            return model.score(hidden)[0]
        return model(sequence[None]).logits[0]


def run_case(folder: Path, groups: Groups, role: Role) -> dict:
    model = build_model(read_hf_config(folder), groups, role=role, dtype=torch.float32)
    load_hf(model, folder)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, model.vocab_size, (length,), generator=generator) for length in LENGTHS]
    batch = pack_sequences(sequences, groups.layout)
    output = whole_output(model, batch)
    distance = 0.0
    if output is not None:
        for sequence, found in zip(sequences, batch.unpack(output), strict=True):
            expected = transformers_output(folder, role, sequence)
            distance = max(distance, (found[:, : expected.size(1)] - expected).abs().max().item())
    exported = {name: tensor.clone() for name, tensor in export_hf(model)}
    reader = SafetensorsReader(folder)
    different = [n for n, t in exported.items() if n not in reader or not torch.equal(t, reader.read(n))]
    return {"distance": distance, "missing": sorted(set(reader.names()) - set(exported)), "different": different}


def main() -> None:
    end_at_the_time_limit()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    models_folder, results_file = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world_size = platform.init_distributed(LIMIT_S)
    results = {}
    for case in json.loads(sys.argv[3]):
        groups = build_groups(Layout(world_size=world_size, **case["layout"]))
        for model in case["models"]:
            mine = run_case(models_folder / model, groups, Role(case.get("role", "causal_lm")))
            everyones: list[dict] = [{} for _ in range(world_size)]
            dist.all_gather_object(everyones, mine)
            mine["distance"] = max(result["distance"] for result in everyones)
            results[f"{case['name']} {model}"] = mine
    if rank == 0:
        results_file.write_text(json.dumps(results))
    platform.shutdown_distributed()


if __name__ == "__main__":
    main()
