"""Counted FLOPs against torch's own counter on transformers models; and what is made of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megarl.config import ModelShape
from megarl.observe import ModelFlops, measure_peak_tflops, performance
from megarl.observe import flops as observe_flops
from megarl.observe.console import FIGURES
from tests.tiny_models import make_hf_model

LENGTHS = (96, 40)


def _count(run: Callable[[], object]) -> dict[str, int]:
    """FLOPs of weight matrices and of attention, by torch."""
    with FlopCounterMode(display=False) as counter:
        run()
    by_operator = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    attention = by_operator.pop("aten.bmm", 0)
    return {"weights": sum(by_operator.values()), "attention": attention}


def _causal(count: dict[str, int]) -> float:
    """Eager attention computes the half that the mask throws away too."""
    return count["weights"] + count["attention"] / 2


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def hf_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = make_hf_model(request.param, tmp_path_factory.mktemp(request.param))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), folder


def test_forward_and_update_agree_with_torchs_counter(hf_model: tuple[torch.nn.Module, Path]) -> None:
    model, folder = hf_model
    flops = ModelFlops(shape=ModelShape.from_hf(folder))
    rows = [torch.randint(0, 200, (1, length)) for length in LENGTHS]
    forward = sum(_causal(_count(lambda row=row: model(row))) for row in rows)
    update = sum(_causal(_count(lambda row=row: model(row, labels=row).loss.backward())) for row in rows)
    assert flops.forward(LENGTHS) == pytest.approx(forward, rel=0.02)
    assert flops.update(LENGTHS) == pytest.approx(update, rel=0.02)


def test_generation_agrees_with_torchs_counter_of_a_loop_with_a_cache(hf_model: tuple[torch.nn.Module, Path]) -> None:
    model, folder = hf_model
    prompt, response, samples = 24, 16, 4

    def generate() -> None:
        """A prefill of one row, then every sample token by token."""
        cache = transformers.DynamicCache()
        model(torch.ones(1, prompt, dtype=torch.int64), past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(samples)
        for _ in range(response):
            model(torch.ones(samples, 1, dtype=torch.int64), past_key_values=cache)

    with torch.no_grad():
        prefill = _count(lambda: model(torch.ones(1, prompt, dtype=torch.int64), logits_to_keep=1))
        counted = _count(generate)
    expected = counted["weights"] + counted["attention"] - prefill["attention"] / 2
    flops = ModelFlops(shape=ModelShape.from_hf(folder))
    ours = flops.generation([prompt] * samples, [response] * samples, samples_per_prompt=samples)
    assert ours == pytest.approx(expected, rel=0.02)


def test_a_mixture_of_experts_counts_the_experts_that_a_token_passes_through(tmp_path: Path) -> None:
    folder = make_hf_model("qwen3_moe", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    counted = _count(lambda: model(torch.randint(0, 200, (1, 96))))
    flops = ModelFlops(shape=ModelShape.from_hf(folder))
    assert flops.forward([96]) == pytest.approx(_causal(counted), rel=0.02)


def test_performance_is_plain_arithmetic() -> None:
    metrics = performance(flops=8e12, tokens=6000, seconds=4.0, world_size=2, peak_tflops=2.5)
    assert metrics.pop("perf/max_memory_gb") > 0
    assert metrics == {
        "perf/total_num_tokens": 6000,
        "perf/time_per_step": 4.0,
        "perf/tokens_per_s": 1500.0,
        "perf/throughput": 750.0,
        "perf/mfu": pytest.approx(0.4),
    }


def test_on_a_cpu_memory_is_the_resident_set_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("memory is that of the GPU here")
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells the high water in /proc")
    ballast = torch.ones(64 * 1024 * 1024, dtype=torch.uint8)
    high_water_kib = int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text()).group(1))
    metrics = performance(flops=1, tokens=1, seconds=1, world_size=1, peak_tflops=1)
    assert metrics["perf/max_memory_gb"] == pytest.approx(high_water_kib / 1024**2, rel=0.02)
    del ballast


def _peak_of_a_device(monkeypatch: pytest.MonkeyPatch, tflops: float) -> tuple[float, list[int]]:
    """The peak measured on a stand-in of known speed, and the widths of the matrices that it had to multiply."""
    widths: list[int] = []

    def seconds(matrix: torch.Tensor) -> float:
        widths.append(len(matrix))
        return 2 * len(matrix) ** 3 / (tflops * 1e12)

    monkeypatch.setattr(observe_flops, "_seconds_of_product", seconds)
    return measure_peak_tflops.__wrapped__(torch.float32), widths


def test_the_measured_peak_is_the_rate_of_a_large_product(monkeypatch: pytest.MonkeyPatch) -> None:
    peak, widths = _peak_of_a_device(monkeypatch, tflops=0.05)
    assert peak == pytest.approx(0.05)
    assert max(widths) >= 512
    assert sum(2 * width**3 for width in widths) / 0.05e12 < 1, "within a second"


def test_a_slow_device_is_not_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    peak, widths = _peak_of_a_device(monkeypatch, tflops=0.001)
    assert peak == pytest.approx(0.001)
    assert set(widths) == {256}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_of_this_device_is_measured_once(dtype: torch.dtype) -> None:
    peak = measure_peak_tflops(dtype)
    assert peak > 0
    assert measure_peak_tflops(dtype) is peak


def test_every_metric_that_the_console_and_performance_name_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    named = {name for figure in FIGURES for name in figure.names}
    named |= performance(flops=1, tokens=1, seconds=1, world_size=1, peak_tflops=1).keys()
    in_tables = set()
    for text in re.findall(r"^\| `(.+?)` \|", documented, re.MULTILINE):
        in_tables |= {text.replace("{mean,max,min}", statistic) for statistic in ("mean", "max", "min")}
    assert named <= in_tables
