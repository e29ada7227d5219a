"""Program: runs a config whose engine is killed twice, in the rollout of the first step and in the sync after it.

Usage: torchrun … sglang_kill_rank.py CONFIG
"""

from __future__ import annotations

import sys
from typing import Any

import psutil

from megarl.config import load_config
from megarl.rollout.sglang.process import EngineProcess
from megarl.rollout.sglang_engine import SGLangEngine
from megarl.trainers.run import run

STEPS_OF_THE_KILLED_SYNC = 1


def scheduler_of(pid: int) -> psutil.Process:
    return next(child for child in psutil.Process(pid).children() if "sglang::" in " ".join(child.cmdline()))


def kill_in_first_rollout() -> None:
    draw = EngineProcess.draw

    def draw_and_kill(self: EngineProcess, draws: Any) -> None:
        EngineProcess.draw = draw
        scheduler = scheduler_of(self.pid)
        scheduler.suspend()  # or it might be done before it is killed
        draw(self, draws)
        scheduler.kill()

    EngineProcess.draw = draw_and_kill


def kill_in_sync_after_it() -> None:
    receive = SGLangEngine.receive_bucket

    def receive_and_kill(self: SGLangEngine, bucket: Any) -> None:
        if self._next_version == STEPS_OF_THE_KILLED_SYNC:
            SGLangEngine.receive_bucket = receive
            assert self.pid is not None
            scheduler_of(self.pid).kill()
        receive(self, bucket)

    SGLangEngine.receive_bucket = receive_and_kill


if __name__ == "__main__":
    kill_in_first_rollout()
    kill_in_sync_after_it()
    sys.exit(run(load_config(sys.argv[1])))
