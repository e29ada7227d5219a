"""Published runs and syncs to lay an estimate beside. The numbers are the projects' own, as of August 2026."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedSync:
    """One model's weights on their way from trainer to engines."""

    parameters: float
    text: str

    def describe(self) -> str:
        """One line."""
        return self.text


_MILES = "miles, docs/advanced/p2p-weight-transfer.md"
_VERL = "verl, docs/advance/delta_weight_sync.md"

SYNCS = (
    PublishedSync(
        parameters=30.5e9,
        text=f"Qwen3-30B-A3B whole by NCCL 32 s ({_VERL}), in buckets 2.7 s, each rank its share by RDMA 2.2 s "
        f"({_MILES})",
    ),
    PublishedSync(parameters=72.7e9, text=f"Qwen2.5-72B whole by NCCL 29 s ({_VERL})"),
    PublishedSync(
        parameters=235e9,
        text=f"Qwen3-235B-A22B whole by NCCL 246 s ({_VERL}), in buckets 11 s, each rank its share by RDMA 3.2 s "
        f"({_MILES})",
    ),
    PublishedSync(
        parameters=671e9,
        text="DeepSeek-V3 671B, each rank its share by NCCL 2.4-2.8 s (NeMo-RL, "
        "docs/design-docs/nccl-reshard-refit.md)",
    ),
    PublishedSync(
        parameters=744e9, text=f"GLM-5 744B whole by NCCL in buckets 58 s, each rank its share by RDMA 8.5 s ({_MILES})"
    ),
)


def similar_runs(parameters: float) -> list[PublishedRun]:
    """Runs of models of at most four times or at least a quarter of the size, nearest first."""
    return _similar(RUNS, parameters)


def similar_syncs(parameters: float) -> list[PublishedSync]:
    """The same of syncs."""
    return _similar(SYNCS, parameters)


_Entry = TypeVar("_Entry", PublishedRun, PublishedSync)


def _similar(entries: Sequence[_Entry], parameters: float) -> list[_Entry]:
    ratio = lambda entry: max(entry.parameters / parameters, parameters / entry.parameters)
    return sorted((entry for entry in entries if ratio(entry) <= _SIMILAR_SIZE), key=ratio)
