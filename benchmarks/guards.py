"""What guards cost: a look at a step's metrics with all default guards, and the question before each update.

    torchrun --nproc-per-node 2 benchmarks/guards.py [--rounds 200] [--step-seconds 1.0] [--json]

The median round on rank 0 counts. Without a guard of `skip_step` no question is asked before an update.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

from megarl import platform
from megarl.config import RunConfig
from megarl.config.guard_rules import guard_rules
from megarl.data.sampler import PromptSampler
from megarl.observe.guards import Guards
from megarl.parallel.groups import build_groups
from megarl.trainers.guard import ActingGuards
from megarl.trainers.update_watch import Add, UpdateWatch

OTHER_METRICS = 120
"""About as many as an RL step has beside those that are watched."""


class NoCheckpoints:
    """Nothing is rolled back here."""

    steps: tuple[int, ...] = ()

    def finish(self) -> None:
        """Nothing is on its way."""

    def roll_back_to(self, step: int) -> None:
        raise NotImplementedError


def median_seconds(action: Callable[[int], object], rounds: int) -> float:
    """Of one call, which gets the number of its round."""
    seconds = []
    for round_ in range(1, rounds + 1):
        start = time.perf_counter()
        action(round_)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=1.0, help="of the step that the cost is a share of")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rank, world_size = platform.init_distributed()
    config = RunConfig()
    config.guard.grad_norm.action = config.guard.kl.action = "skip_step"
    groups = build_groups(config.parallel.layout(world_size), seed=1)
    guards = Guards(guard_rules(config), config.guard)
    watch = UpdateWatch(guards, groups)
    metrics = dict.fromkeys(guards.metrics, 0.5) | {f"other/{number}": 0.5 for number in range(OTHER_METRICS)}
    metrics |= {name: 0.0 for name in metrics if name.endswith(("ppo_kl", "skipped_updates", "clip_ratio"))}

    def record(add: Add, outputs: list) -> None:
        add("actor/ppo_kl", 0.01, 1)

    veto = watch.veto("actor/grad_norm", record)
    assert veto is not None
    with tempfile.TemporaryDirectory() as config.trainer.default_local_dir:
        acting = ActingGuards(
            guards,
            watch,
            config,
            schedules=[],
            sampler=PromptSampler(8, 4, shuffle=True, seed=1),
            checkpoints=NoCheckpoints(),
            after_rollback=lambda: None,
            tell=lambda text: None,
            start=0,
            total_steps=arguments.rounds,
        )
        watch.begin_step()
        look = median_seconds(lambda step: acting.after_step(step, metrics), arguments.rounds)
        ask = median_seconds(lambda step: veto([], lambda: 1.0), arguments.rounds)
    found = {
        "world_size": world_size,
        "rules": len(guards.rules),
        "look_ms": 1e3 * look,
        "look_share_of_step": look / arguments.step_seconds,
        "ask_ms_per_update": 1e3 * ask,
    }
    if rank == 0:
        if arguments.json:
            print(json.dumps(found))
        else:
            print(f"{found['rules']} rules, {world_size} ranks: {found['look_ms']:.3f} ms a step")
            print(f"that is {100 * found['look_share_of_step']:.3f} % of a step of {arguments.step_seconds:g} s")
            print(
                f"with skip_step: {found['ask_ms_per_update']:.3f} ms more for each update, without the gradient's norm"
            )
    platform.shutdown_distributed()


if __name__ == "__main__":
    main()
