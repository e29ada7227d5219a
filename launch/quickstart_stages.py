"""The stages of a quickstart: commands of the project, shown before they run, and timed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Stages:
    """Runs the commands of each stage and keeps its time."""

    def __init__(self, ranks: int, engine: str = "transformers") -> None:
        """Args:
        engine: what generates, for those stages that do.
        """
        self.ranks = ranks
        self.engine = engine
        self.seconds: dict[str, float] = {}
        # Each rank is one process with its share of the cores; more threads than cores slow all of them down.
        threads = max((os.cpu_count() or 1) // ranks, 1)
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}

    def run(self, stage: str, *arguments: str | Path) -> None:
        """Runs a script of the project in one process; ends the quickstart where it fails."""
        self._run(stage, [sys.executable], "python", arguments)

    def train(self, stage: str, config: str, **settings: object) -> None:
        """Runs launch/train.py under torchrun; ends the quickstart where it fails.

        Args:
            settings: `model__path=…` is the config's key `model.path`; those that are None stay as the config has them.
        """
        overrides = [f"{key.replace('__', '.')}={value}" for key, value in settings.items() if value is not None]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        arguments = ["launch/train.py", "--config", config, *overrides]
        self._run(stage, [sys.executable, *launcher], f"torchrun --nproc-per-node={self.ranks}", arguments)

    def _run(self, stage: str, program: list[str], shown: str, arguments: Sequence[str | Path]) -> None:
        texts = [str(argument) for argument in arguments]
        print(f"\n[{stage}] {shown} {shlex.join(texts)}", flush=True)
        start = time.perf_counter()
        status = subprocess.run([*program, *texts], cwd=ROOT, env=self._environment).returncode
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        if status != 0:
            print(f"quickstart: stage {stage} failed with status {status} (see above)", file=sys.stderr)
            sys.exit(1)
