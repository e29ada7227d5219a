"""Program: syncs models to engines that record what they are given, and compares it with the models' folders.

Usage: torchrun … sync_ranks.py MODELS_FOLDER RESULTS_FILE CASES_JSON

A case is a layout, an engine layout, a bucket size and models. Results, by "model, layout, engine": a dict with

- `problems`: what engines of all ranks were given wrongly, one sentence each
- `placed`: whether the plan's parts, on every rank, are those that the ranks' real modules hold
- `traffic`: of each rank
- `buckets`: bytes of each bucket, on each rank
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl import platform
from megarl.config.layout import Layout
from megarl.models.bridge import read_hf_config
from megarl.models.build import MegatronModel, build_model
from megarl.parallel.groups import Groups, build_groups
from megarl.trainers.sync import sync_weights
from megarl.weights.bucket import Bucket
from megarl.weights.checksum import checksum
from megarl.weights.export_hf import plan_export
from megarl.weights.load_hf import load_hf
from megarl.weights.placement import rank_places
from megarl.weights.plan import EngineLayout
from megarl.weights.sync_source import make_bucket_stream, placed_tensors
from tests.launch import LIMIT_S, end_at_the_time_limit


class RecordingEngine:
    """Takes everything, and keeps copies."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.bucket_bytes: list[int] = []
        self.memory: set[int] = set()
        self.problems: list[str] = []

    def begin_weight_update(self, version: int) -> None:
        pass

    def receive_bucket(self, bucket: Bucket) -> None:
        self.bucket_bytes.append(bucket.data.nbytes)
        self.memory.add(bucket.data.untyped_storage().data_ptr())
        for name, tensor in bucket.tensors():
            if name in self.held:
                self.problems.append(f"{name} came twice")
            self.held[name] = tensor.clone()
            if bucket.checksums[name] != checksum(tensor):
                self.problems.append(f"{name} has another checksum")

    def end_weight_update(self) -> None:
        pass


def problems_of(engine: RecordingEngine, expected: dict[str, torch.Tensor]) -> list[str]:
    found = list(engine.problems)
    found += [f"{name} did not come" for name in expected.keys() - engine.held.keys()]
    for name, tensor in engine.held.items():
        if name not in expected:
            found.append(f"{name} is not this engine's")
        elif tensor.dtype != expected[name].dtype or not torch.equal(tensor, expected[name]):
            found.append(f"{name} is not the folder's")
    return [f"rank {dist.get_rank()}: {problem}" for problem in found]


def is_placed(model: MegatronModel) -> bool:
    """Whether what the plan derives is what ranks offer when they are asked."""
    real = plan_export(model)
    mine = {name: sorted(piece.hf_box for _, piece in pieces) for name, pieces in real.mine.items()}
    everyones: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, mine)
    tensors = placed_tensors(model)
    infos = {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors}
    if infos != {name: (tuple(info.shape), info.dtype) for name, info in real.tensors.items()}:
        return False
    for rank, held in enumerate(everyones):
        places = rank_places(model.groups.layout, rank)
        derived = {t.name: sorted(part.box for part in t.parts if part.place in places) for t in tensors}
        if {name: boxes for name, boxes in derived.items() if boxes} != held:
            return False
    return True


def run_case(folder: Path, groups: Groups, case: dict[str, Any]) -> dict[str, Any]:
    hf_config = read_hf_config(folder)
    model = build_model(hf_config, groups, dtype=torch.float32)
    load_hf(model, folder)
    engine_layout = EngineLayout(**case["engine"])
    stream = make_bucket_stream(model, engine_layout, bucket_bytes=case["bucket_bytes"], mapped=False)
    engine = RecordingEngine()
    traffic = sync_weights(stream, engine, 1, check=True)
    weights = load_file(folder / "model.safetensors")
    experts = model.config.num_moe_experts or 1
    share = range(experts // engine_layout.ep) if experts else range(0)
    first = engine_layout.expert_rank(groups.rank) * len(share)
    takes_nothing = engine_layout.by_first_rank and groups.rank % engine_layout.tp
    wanted = {
        name: tensor
        for name, tensor in ({} if takes_nothing else weights).items()
        if ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) - first in share
    }
    mine = {
        "problems": problems_of(engine, wanted),
        "traffic": dataclasses.asdict(traffic),
        "buckets": engine.bucket_bytes,
        "memories": len(engine.memory),
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {
        "placed": is_placed(model),
        "problems": [problem for one in everyones for problem in one["problems"]],
        **{key: [one[key] for one in everyones] for key in ("traffic", "buckets", "memories")},
        "largest": max(t.nbytes for t in weights.values()),
        "total": sum(t.nbytes for t in weights.values()),
    }


def main() -> None:
    end_at_the_time_limit()
    logging.disable(logging.WARNING)
    models, file = Path(sys.argv[1]), Path(sys.argv[2])
    _, world_size = platform.init_distributed(LIMIT_S)
    results = {}
    for case in json.loads(sys.argv[3]):
        groups = build_groups(Layout(world_size=world_size, **case["layout"]))
        for name in case["models"]:
            results[f"{name} {case['layout']} {case['engine']}"] = run_case(models / name, groups, case)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(results))
    platform.shutdown_distributed()


if __name__ == "__main__":
    main()
