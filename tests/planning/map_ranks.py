"""Program: which boxes ranks hold, by the plan of real ranks or by modules that are built for the map.

Usage: torchrun … map_ranks.py real MODELS_FOLDER RESULTS_FILE CASES_JSON
       python map_ranks.py simulated MODELS_FOLDER RESULTS_FILE CASES_JSON

Real: JSON, by case a list of {tensor: boxes} by rank. Simulated: pickled, by case (what ranks hold, the architecture's
tensors).
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config.layout import Layout
from megarl.models.bridge import read_hf_config
from megarl.models.build import Role, build_model
from megarl.parallel.groups import build_groups
from megarl.planning.simulated_ranks import held_by_ranks
from megarl.weights.architecture_tensors import architecture_tensors
from megarl.weights.export_hf import plan_export
from tests.launch import LIMIT_S, end_at_the_time_limit


def real(models: Path, file: Path, cases: list[dict]) -> None:
    _, world_size = platform.init_distributed(LIMIT_S)
    results = {}
    built, groups = None, None
    for case in sorted(cases, key=lambda case: json.dumps(case["layout"])):
        if case["layout"] != built:  # cases of one layout stand together: its groups keep their threads
            built, groups = case["layout"], build_groups(Layout(world_size=world_size, **case["layout"]))
        hf_config = read_hf_config(models / case["model"])
        model = build_model(hf_config, groups, role=Role(case["role"]), dtype=torch.float32)
        plan = plan_export(model)
        mine = {name: [piece.hf_box for _, piece in pieces] for name, pieces in plan.mine.items()}
        everyones: list[dict] = [{} for _ in range(world_size)]
        dist.all_gather_object(everyones, mine)
        results[case["name"]] = everyones
    if dist.get_rank() == 0:
        file.write_text(json.dumps(results))
    platform.shutdown_distributed()


def simulated(models: Path, file: Path, cases: list[dict]) -> None:
    platform.current()
    results = {}
    for case in cases:
        hf_config, role = read_hf_config(models / case["model"]), Role(case["role"])
        layout = Layout(world_size=case["ranks"], **case["layout"])
        results[case["name"]] = held_by_ranks(hf_config, layout, role), architecture_tensors(hf_config, role)
    file.write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    end_at_the_time_limit()
    logging.disable(logging.WARNING)
    {"real": real, "simulated": simulated}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
