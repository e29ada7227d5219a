"""SFT → reward model → PPO: a model of 0.15 million parameters learns to sort digits, and is measured at each stage.

    bash launch/pipeline.sh [--output DIR] [--seed N] [--ranks N] [--steps N]

SFT imitates demonstrations of which more than half are wrong. A reward model learns from pairs which answers are
preferred, and PPO with a critic makes the model write such answers. Every stage is a command of the project that works
by itself, and is printed before it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from option_types import whole
from quickstart_jobs import dataset_options
from quickstart_stages import Stages

HELD_OUT = 256
CRITIC_WARMUP = 5
"""Of configs/pipeline_ppo.yaml."""
CONFIGS = {"sft": "pipeline_sft.yaml", "reward_model": "pipeline_reward_model.yaml", "ppo": "pipeline_ppo.yaml"}


def main() -> int:
    options = parse_options()
    output = options.output.resolve()
    if (output / "summary.json").exists():
        print(f"{output} holds an earlier run; choose another --output, or remove it", file=sys.stderr)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    stages = Stages(options.ranks)
    make_model_and_data(stages, output, options.seed)
    train(stages, output, options.seed, options.steps)
    summary = summarise(output, options.seed, stages)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(report(summary, output))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch/pipeline.sh", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("outputs", "pipeline"), metavar="DIR", help="folder to fill"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of questions, sampling and data order")
    parser.add_argument("--ranks", type=whole(1), default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument(
        "--steps", type=whole(1), metavar="N", help="steps of each stage (default: what its config says)"
    )
    return parser.parse_args()


def make_model_and_data(stages: Stages, output: Path, seed: int) -> None:
    """A new model, and questions as demonstrations, as pairs, and by themselves."""
    if not (output / "model").exists():
        size = ["--hidden", "64", "--layers", "3", "--seed", str(seed)]
        stages.run("model", "tools/make_tiny_model.py", "--out", output / "model", *size)
    for form in ("", "demonstrations", "pairs"):
        options = dataset_options(output, seed, size=8_000, held_out=HELD_OUT, prefix=form and f"{form}-")
        stages.run("data", "tools/data/sorting.py", *([f"--{form}"] if form else []), *options)


def train(stages: Stages, output: Path, seed: int, steps: int | None) -> None:
    """The three stages, each from what the one before exported."""
    data, sft, judge = output / "data", output / "sft", output / "reward_model"
    settings = {
        "sft": {"model__path": output / "model", **_files(data, "demonstrations-")},
        "reward_model": {"model__path": sft / "hf", **_files(data, "pairs-")},
        "ppo": {
            "model__path": sft / "hf",
            "critic__path": judge / "hf",
            "reward__model__path": judge / "hf",
            **_files(data, ""),
        },
    }
    if steps is not None:
        # Of few steps, some have to be left for the actor.
        settings["ppo"]["trainer__critic_warmup"] = min(steps // 2, CRITIC_WARMUP)
    for stage, config in CONFIGS.items():
        stages.train(
            stage,
            config,
            **settings[stage],
            trainer__default_local_dir=output / stage,
            trainer__seed=seed,
            trainer__total_training_steps=steps,
        )


def _files(data: Path, prefix: str) -> dict[str, Path]:
    return {"data__train_files": data / f"{prefix}train.parquet", "data__val_files": data / f"{prefix}test.parquet"}


def summarise(output: Path, seed: int, stages: Stages) -> dict[str, Any]:
    """Everything that `summary.json` says."""
    lines = {stage: _metrics(output / stage) for stage in CONFIGS}
    evaluations = [line for line in lines["ppo"] if any(name.startswith("val-core/") for name in line)]
    curve = [
        {
            "step": line["step"],
            "reward": _value(line, "val-core/", "/model/mean@"),
            "accuracy": _value(line, "val-core/", "/rule/mean@"),
            "sampled_reward": _value(line, "val-sampled/", "/model/mean@"),
            "sampled_accuracy": _value(line, "val-sampled/", "/rule/mean@"),
        }
        for line in evaluations
    ]
    return {
        "reward_model_accuracy": next(x["val/accuracy"] for x in lines["reward_model"][::-1] if "val/accuracy" in x),
        "after_sft": curve[0],
        "after_ppo": curve[-1],
        "curve": curve,
        "held_out_prompts": HELD_OUT,
        "seconds": {stage: round(seconds, 1) for stage, seconds in stages.seconds.items()},
        "settings": {"configs": CONFIGS, "seed": seed, "ranks": stages.ranks},
    }


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _value(line: dict[str, Any], prefix: str, middle: str) -> float:
    return next(value for name, value in line.items() if name.startswith(prefix) and middle in name)


def report(summary: dict[str, Any], output: Path) -> str:
    """What a person wants to know at the end."""
    names = ("reward", "accuracy", "sampled_reward", "sampled_accuracy")
    rows = "\n".join(
        f"{point['step']:>9}  " + "  ".join(f"{point[name]:>{len(name)}.2f}" for name in names)
        for point in summary["curve"]
    )
    return f"""
the reward model tells {summary["reward_model_accuracy"]:.0%} of held-out pairs apart
on {summary["held_out_prompts"]} held-out questions, before (step 0: after SFT) and during PPO:
 PPO step  {"  ".join(names)}
{rows}
seconds: {", ".join(f"{stage} {seconds:.0f}" for stage, seconds in summary["seconds"].items())}

curves               tensorboard --logdir {output}
the model            {output / "ppo" / "hf"}
its critic           {output / "ppo" / "critic-hf"}
the reward model     {output / "reward_model" / "hf"}
this summary         {output / "summary.json"}"""


if __name__ == "__main__":
    sys.exit(main())
