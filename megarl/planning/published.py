"""Published runs that an estimate can be laid beside. The numbers are the projects' own, as of August 2026."""

from __future__ import annotations

from dataclasses import dataclass

_SIMILAR_SIZE = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """One reinforcement-learning run, on-policy."""

    model: str
    parameters: float
    """Of the whole model."""
    gpus: int
    gpu: str
    source: str
    step_s: float
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None

    def describe(self) -> str:
        """One line."""
        rate = f", {self.tokens_per_s_per_gpu:g} tokens/s/GPU" if self.tokens_per_s_per_gpu else ""
        mfu = f", MFU {self.mfu:g}" if self.mfu else ""
        return f"{self.model}, {self.gpus} × {self.gpu}: step {self.step_s:g} s{rate}{mfu} ({self.source})"


_NEMO = "NeMo-RL 0.6, docs/about/performance-summary.md"

RUNS = (
    PublishedRun(
        model="DeepSeek-V3 671B",
        parameters=671e9,
        gpus=256,
        gpu="H100",
        source=_NEMO,
        step_s=134,
        tokens_per_s_per_gpu=12.1,
    ),
    PublishedRun(
        model="DeepSeek 671B",
        parameters=671e9,
        gpus=96,
        gpu="H20",
        source="verl, docs/perf/dpsk.md",
        step_s=1700,
        mfu=0.19,
    ),
    PublishedRun(
        model="Qwen3-235B-A22B",
        parameters=235e9,
        gpus=128,
        gpu="H100",
        source=_NEMO,
        step_s=395,
        tokens_per_s_per_gpu=58.9,
    ),
    PublishedRun(
        model="Qwen3-30B-A3B",
        parameters=30.5e9,
        gpus=32,
        gpu="H100",
        source=_NEMO,
        step_s=192,
        tokens_per_s_per_gpu=1102,
    ),
)


def similar_runs(parameters: float) -> list[PublishedRun]:
    """Runs of models of at most four times or at least a quarter of the size, nearest first."""
    ratio = lambda run: max(run.parameters / parameters, parameters / run.parameters)
    return sorted((run for run in RUNS if ratio(run) <= _SIMILAR_SIZE), key=ratio)
