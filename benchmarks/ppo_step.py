"""What the critic costs: PPO steps beside GRPO steps on the same model and prompts, interleaved, phase by phase.

    python benchmarks/ppo_step.py                                     # a random qwen2: 4 layers, hidden size 128
    python benchmarks/ppo_step.py --hf models/SmolLM2-135M-Instruct --dtype bfloat16 --rounds 3
    torchrun --nproc-per-node 2 benchmarks/ppo_step.py

PPO has a critic as large as the actor: one more forward pass for the values and one more update. Everything else is the
same, and the learning rate is so small that both generate the same responses.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
from pathlib import Path

import torch.distributed as dist
import transformers
from grpo_step import PROMPTS, SAMPLES, random_model, say, shared_by_all, write_prompts

from megarl import platform
from megarl.config import load_config
from megarl.config.layout import Layout
from megarl.parallel.groups import Groups, build_groups
from megarl.trainers.rl import RLTrainer
from megarl.trainers.rl_parts import build_rl_parts

PHASES = ("gen", "exchange", "values", "adv", "update_critic", "update_actor", "sync", "step")
ESTIMATORS = {"GRPO": "grpo", "PPO": "gae"}


def make_trainer(folder: Path, model: Path, dtype: str, tokens: int, estimator: str, groups: Groups) -> RLTrainer:
    overrides = {
        "model.path": model,
        "model.dtype": dtype,
        "data.train_files": folder / "prompts.parquet",
        "data.train_batch_size": PROMPTS,
        "data.max_response_length": tokens,
        "actor.ppo_mini_batch_size": PROMPTS,
        "actor.max_tokens_per_micro_batch": 4096,
        # The same work for both: a step of GRPO would leave groups without variance out.
        "actor.skip_zero_advantage": "false",
        "algorithm.adv_estimator": estimator,
        "rollout.n": SAMPLES,
        "reward.custom.path": folder / "reward.py",
        "optim.lr": 1e-12,
        "trainer.default_local_dir": folder,
        "trainer.total_epochs": 1000,
    }
    config = load_config(str(folder / "run.yaml"), [f"{key}={value}" for key, value in overrides.items()])
    trainer = RLTrainer(build_rl_parts(config, groups))
    trainer.sync()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, help="a Hugging Face chat model; a small random qwen2 if not given")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=32, help="most of each response")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    rank, ranks = platform.init_distributed()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shared_by_all(temporary))
        model = arguments.hf or folder / "model"
        if rank == 0:
            write_prompts(folder, [f"What is {i} plus {7 * i}? Answer with a number." for i in range(64)])
            if not arguments.hf:
                random_model(model)
        dist.barrier()
        groups = build_groups(Layout(world_size=ranks), seed=1)
        trainers = {
            name: make_trainer(folder, model, arguments.dtype, arguments.tokens, estimator, groups)
            for name, estimator in ESTIMATORS.items()
        }
        seconds = measure(trainers, arguments.rounds)
        for trainer in trainers.values():
            trainer.parts.close()
        dist.barrier()
    medians = {name: {phase: statistics.median(times) for phase, times in by.items()} for name, by in seconds.items()}
    say(f"seconds, median of {arguments.rounds} interleaved rounds on {ranks} rank(s)")
    say(f"{'':>14}" + "".join(f"{name:>9}" for name in medians))
    for phase in PHASES:
        say(f"{phase:>14}" + "".join(f"{by.get(phase, 0.0):>9.3f}" for by in medians.values()))
    say(f"a PPO step takes {medians['PPO']['step'] / medians['GRPO']['step']:.2f} × a GRPO step")
    if arguments.json and rank == 0:
        arguments.json.write_text(json.dumps(medians))
    platform.shutdown_distributed()


def measure(trainers: dict[str, RLTrainer], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each phase by side; the first round, which touches new memory, is left out."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in trainers}
    for step in range(rounds + 1):
        for name, trainer in trainers.items():
            parts = trainer.parts
            metrics = trainer.train_step(step, parts.train_data.prompts(parts.sampler.next_batch()))
            for key, value in metrics.items():
                if step and key.startswith("timing_s/"):
                    seconds[name].setdefault(key.removeprefix("timing_s/"), []).append(value)
    return seconds


if __name__ == "__main__":
    main()
