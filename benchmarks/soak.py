"""Kills parts of a run at random, again and again, and looks whether it has the weights of a run left in peace.

    python benchmarks/soak.py --kills 100
    python benchmarks/soak.py --kills 4 --seed 3 --keep /tmp/soak

A small PPO run (actor, critic, reference, adaptive KL) of two ranks under `torchrun --max-restarts`, which saves every
second step. What is killed (SIGKILL) is drawn: a rank, or one of its reward workers; and so is when: up to three steps
after the run has come to itself, at any moment of a step. Some ranks are killed once more while they start again. The
seed fixes the draws; what a run is
doing at that moment is up to the machine. A rank's end costs a restart of all ranks, which go on from the last
checkpoint; a reward worker's end costs its response, which is scored again or gets `reward.failure_score`: such a kill
would change the weights, so the reward function here is async, whose responses are all scored again.

The run that is killed has no last step until all kills are done, however fast or slow the machine is. Then torchrun
itself is killed, and another one brings the run to an end two steps on; the run left in peace takes as many steps.

Exit status 1 where weights differ or the run did not end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from grpo_step import random_model, write_prompts
from safetensors.torch import load_file

from megarl.processes.parent import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
SAVE_FREQ = 2
MOST_STEPS_TO_KILL = 3
WORKER_SHARE = 0.25
"""Of the kills, those of reward workers."""
AGAIN_SHARE = 0.15
"""Of the kills of ranks, those with a second one in the start that follows."""
REWARD = """
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 17 / 16.0
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One kill, as it is drawn."""

    of_worker: bool
    rank: int
    after_steps: int
    """Steps that are recorded since the run came to itself."""
    fraction: float
    """Of a step, to wait beyond that."""
    again_after: float | None
    """Of a start, after which the rank is killed again; None: it is not."""


def draw(generator: random.Random) -> Kill:
    return Kill(
        of_worker=generator.random() < WORKER_SHARE,
        rank=generator.randrange(RANKS),
        after_steps=generator.randint(0, MOST_STEPS_TO_KILL),
        fraction=generator.random(),
        again_after=generator.random() if generator.random() < AGAIN_SHARE else None,
    )


def write_run(folder: Path) -> Path:
    """Model, data, reward function and config of a run without end; returns the config's path."""
    write_prompts(folder, [f"What is {i} plus {3 * i}?" for i in range(64)])
    (folder / "reward.py").write_text(REWARD)
    optim = {"lr": 1e-3, "eps": 1e-4}
    config = {
        "model": {"path": str(random_model(folder / "model")), "dtype": "float32"},
        "data": {
            "train_files": str(folder / "prompts.parquet"),
            "train_batch_size": 4,
            "max_prompt_length": 64,
            "max_response_length": 12,
        },
        "actor": {"ppo_mini_batch_size": 2, "max_tokens_per_micro_batch": 512},
        "critic": {"optim": optim},
        "algorithm": {
            "adv_estimator": "gae",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05, "horizon": 20},
        },
        "rollout": {"n": 2},
        "reward": {"custom": {"path": str(folder / "reward.py")}, "num_workers": 1},
        "optim": optim,
        "checkpoint": {"keep_last": 2},
        "observe": {"peak_tflops": 0.1},
        "trainer": {
            "total_epochs": 1_000_000,
            "save_freq": SAVE_FREQ,
            "logger": ["jsonl"],
            "val_before_train": False,
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Run:
    """One torchrun and what it leaves."""

    def __init__(self, config: Path, output: Path, *, restarts: int, steps: int | None = None) -> None:
        self.output = output
        output.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += [f"--max-restarts={restarts}", str(ROOT / "launch/train.py"), "--config", str(config)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command += [f"trainer.default_local_dir={output}"]
        if steps is not None:
            command += [f"trainer.total_training_steps={steps}"]
        self._log = (output / "log.txt").open("a")
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=die_with_parent,
        )

    def ranks(self) -> list[int]:
        """Process ids, in order."""
        return children(self._process.pid)

    def last_step(self) -> int:
        """The last one that is recorded."""
        metrics = self.output / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def recorded_at(self) -> float:
        metrics = self.output / "metrics.jsonl"
        return metrics.stat().st_mtime if metrics.exists() else 0.0

    def saved_step(self) -> int:
        """Of the newest checkpoint."""
        return max((int(folder.name.partition("-")[2]) for folder in self.output.glob("checkpoints/step-*")), default=0)

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Whether it came true before the run was over; a run that stands still is an error."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.is_over():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened in {limit_s:.0f} s; see {self.output / 'log.txt'}")
            time.sleep(0.02)
        return True

    def status(self, limit_s: float) -> int:
        """Of torchrun, at its end."""
        return self._process.wait(limit_s)

    def close(self) -> None:
        """Ends whatever still runs: the ranks die with torchrun."""
        ranks = self.ranks()
        self._process.kill()
        self._process.wait()
        while any(map(is_alive, ranks)):
            time.sleep(0.02)
        self._log.close()


def is_alive(pid: int) -> bool:
    """A process that has ended, but that nobody has waited for yet, has no command line any more."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Children of all its threads: reward workers belong to one of them."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    found = []
    for thread in threads:
        try:
            found += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:
            continue
    return found


@dataclass(kw_only=True, slots=True)
class Tally:
    """What the kills have cost."""

    recovered_s: list[float]
    """From the kill of a rank to the next recorded step beyond the checkpoint."""
    worker_s: list[float]
    """From the kill of a worker to the next recorded step."""
    kills_in_start: int = 0
    start_s: float
    step_s: float


def kill_again_and_again(run: Run, kills: list[Kill], tally: Tally, limit_s: float) -> None:
    for number, kill in enumerate(kills, 1):
        if not carry_out(run, kill, tally, limit_s):
            raise RuntimeError(f"the run ended before kill {number}; see {run.output / 'log.txt'}")
        what = "a reward worker" if kill.of_worker else f"rank {kill.rank}"
        taken = (tally.worker_s if kill.of_worker else tally.recovered_s)[-1]
        print(f"kill {number}/{len(kills)}: {what}; the next step {taken:.1f} s later", flush=True)


def carry_out(run: Run, kill: Kill, tally: Tally, limit_s: float) -> bool:
    """Kills once the time has come, and waits until the run trains again; False where the run is over."""
    first = run.last_step()
    if not run.wait_for(lambda: run.last_step() >= first + kill.after_steps, limit_s):
        return False
    time.sleep(kill.fraction * tally.step_s)
    ranks = run.ranks()
    if len(ranks) < RANKS:
        return False
    if kill.of_worker and not run.wait_for(lambda: bool(descendants(ranks[kill.rank])), limit_s):
        return False
    os.kill(descendants(ranks[kill.rank])[0] if kill.of_worker else ranks[kill.rank], signal.SIGKILL)
    start = time.time()
    if kill.of_worker:
        step = run.last_step()
        came_back = run.wait_for(lambda: run.last_step() > step, limit_s)
        tally.worker_s.append(time.time() - start)
        return came_back
    came_back = wait_for_ranks(run, ranks, limit_s)
    if came_back and kill.again_after is not None:
        time.sleep(kill.again_after * tally.start_s)
        ranks = run.ranks()
        os.kill(ranks[kill.rank], signal.SIGKILL)
        tally.kills_in_start += 1
        came_back = wait_for_ranks(run, ranks, limit_s)
    restarted, saved = time.time(), run.saved_step()
    came_back = came_back and run.wait_for(lambda: run.recorded_at() > restarted and run.last_step() > saved, limit_s)
    tally.recovered_s.append(time.time() - start)
    return came_back


def wait_for_ranks(run: Run, old: list[int], limit_s: float) -> bool:
    """Until all ranks are others than before."""
    return run.wait_for(lambda: len(run.ranks()) == RANKS and not set(old) & set(run.ranks()), limit_s)


def weights(output: Path) -> dict[str, torch.Tensor]:
    """Of actor and critic, as the run exported them."""
    found = {}
    for name in ("hf", "critic-hf"):
        for file in sorted((output / name).glob("*.safetensors")):
            found |= {f"{name} {key}": tensor for key, tensor in load_file(file).items()}
    return found


def differing(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bit for bit the same."""
    if expected.keys() != found.keys():
        return sorted(expected.keys() ^ found.keys())
    return [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds without any progress that are an error")
    parser.add_argument("--keep", type=Path, help="folder that stays, with both runs; a temporary one if not given")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    kills = [draw(generator) for _ in range(arguments.kills)]
    with ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        return soak(write_run(folder), folder, kills, arguments.limit, arguments.json)


def soak(config: Path, folder: Path, kills: list[Kill], limit_s: float, result: Path | None) -> int:
    killed = folder / "killed"
    run = Run(config, killed, restarts=2 * len(kills))
    try:
        tally = watch_start(run, limit_s)
        kill_again_and_again(run, kills, tally, limit_s)
        steps = run.saved_step() + SAVE_FREQ
    finally:
        run.close()
    status = to_the_end(config, killed, steps, limit_s) or to_the_end(config, folder / "in-peace", steps, limit_s)
    expected, found = weights(folder / "in-peace"), weights(folder / "killed")
    wrong = differing(expected, found) if expected else ["all"]
    figures = {
        "kills of ranks": len(tally.recovered_s),
        "kills of ranks that start again": tally.kills_in_start,
        "kills of reward workers": len(tally.worker_s),
        "seconds from kill to the next step, median": statistics.median(tally.recovered_s or [0.0]),
        "seconds from kill to the next step, worst": max(tally.recovered_s, default=0.0),
        "steps": steps,
        "tensors compared": len(expected),
        "tensors that differ": len(wrong),
        "exit status": status,
    }
    print("\n".join(f"{name}: {value:.4g}" for name, value in figures.items()))
    if result is not None:
        result.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if wrong or status else 0


def watch_start(run: Run, limit_s: float) -> Tally:
    """How long the run's start and its steps take, while nothing is done to it."""
    start = time.monotonic()
    run.wait_for(lambda: run.last_step() >= 1, limit_s)
    first, step = time.monotonic(), run.last_step()
    run.wait_for(lambda: run.last_step() >= step + 3, limit_s)
    taken = (time.monotonic() - first) / (run.last_step() - step)
    print(f"first step after {first - start:.1f} s, then {taken:.2f} s each", flush=True)
    return Tally(recovered_s=[], worker_s=[], start_s=first - start, step_s=taken)


def to_the_end(config: Path, output: Path, steps: int, limit_s: float) -> int:
    """Runs until `steps` are done, from the last checkpoint if there is one; returns torchrun's exit status."""
    run = Run(config, output, restarts=0, steps=steps)
    try:
        return run.status(steps * limit_s)
    finally:
        run.close()


if __name__ == "__main__":
    sys.exit(main())
