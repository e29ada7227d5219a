"""Program: runs one config in several layouts of this world, each into its own folder.

Usage: torchrun … train_in_layouts.py CONFIG OUTPUT_FOLDER LAYOUTS_JSON   ({name: [key=value, …]})

Where the first of a list is a YAML file, it is the config of that run.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from megarl import platform
from megarl.config import load_config, validate
from megarl.parallel.groups import build_groups
from megarl.trainers.run import LOOPS
from tests.launch import LIMIT_S, end_at_the_time_limit


def main() -> None:
    end_at_the_time_limit()
    logging.disable(logging.WARNING)
    config_path, output = sys.argv[1], Path(sys.argv[2])
    _, world_size = platform.init_distributed(LIMIT_S)
    for name, overrides in json.loads(sys.argv[3]).items():
        has_own = bool(overrides) and overrides[0].endswith(".yaml")
        path, keys = (overrides[0], overrides[1:]) if has_own else (config_path, overrides)
        config = load_config(path, [*keys, f"trainer.default_local_dir={output / name}"])
        assert validate(config, world_size) == []
        groups = build_groups(config.parallel.layout(world_size), seed=config.trainer.seed)
        LOOPS[config.trainer.kind](config, groups)
    platform.shutdown_distributed()


if __name__ == "__main__":
    main()
