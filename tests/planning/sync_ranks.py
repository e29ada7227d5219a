"""Program: what the export plan of real ranks gives, byte by byte, for the sync plan to be compared with.

Usage: torchrun … sync_ranks.py MODELS_FOLDER RESULTS_FILE CASES_JSON
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config.layout import Layout
from megarl.models.bridge import read_hf_config
from megarl.models.build import build_model
from megarl.parallel.groups import build_groups
from megarl.weights.export_hf import plan_export


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("MEGARL_TEST_TIMEOUT_S", "200")), exit=True)
    logging.disable(logging.WARNING)
    models, file = Path(sys.argv[1]), Path(sys.argv[2])
    _, world_size = platform.init_distributed(120)
    results = {}
    for case in json.loads(sys.argv[3]):
        groups = build_groups(Layout(world_size=world_size, **case["layout"]))
        for name in case["models"]:
            model = build_model(read_hf_config(models / name), groups, dtype=torch.float32)
            plan = plan_export(model)
            given = [0] * world_size
            for tensor, sources in plan.sources.items():
                for source in sources:
                    numel = torch.Size([stop - start for start, stop in source.box]).numel()
                    given[source.rank] += numel * plan.tensors[tensor].dtype.itemsize
            results[f"{name} {case['layout']}"] = {
                "given": given,
                "sizes": sorted(info.num_bytes for info in plan.tensors.values()),
            }
    if dist.get_rank() == 0:
        file.write_text(json.dumps(results))
    platform.shutdown_distributed()


if __name__ == "__main__":
    main()
