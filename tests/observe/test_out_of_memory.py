"""What is said when memory runs out: the phase, the tensors, and keys that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megarl.config import RunConfig
from megarl.config.fields import config_keys
from megarl.observe import Timers, memory_advice
from megarl.observe.live_tensors import LiveTensor, largest_tensors
from megarl.observe.memory_advice import changes_for
from megarl.observe.out_of_memory import is_out_of_memory, report_out_of_memory

ELEMENTS = 2**21
"""Of float32, so 8 MiB: more than anything else that the tests hold."""


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.zeros(ELEMENTS))


class _Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.buffer = tensor


def _fail_holding(megabytes: int) -> None:
    logits = torch.zeros(megabytes, 2**18)
    assert logits.numel()
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def _largest(count: int = 5) -> list[LiveTensor]:
    try:
        _fail_holding(64)
    except torch.OutOfMemoryError as error:
        return largest_tensors("cpu", error, count)[0]
    raise AssertionError


def test_a_local_variable_of_the_failing_function_is_named_with_its_place() -> None:
    largest = _largest()[0]
    assert (largest.bytes, largest.shape, largest.dtype) == (64 * 2**20, (64, 2**18), "float32")
    assert largest.name.startswith("logits in _fail_holding (test_out_of_memory.py:")
    assert "[64, 262144] float32, 64.00 MiB" in largest.describe()


def test_parameters_gradients_and_attributes_are_named_by_what_holds_them() -> None:
    model, holder = _Model(), _Holder(torch.zeros(ELEMENTS + 1))
    model.inner.weight.sum().backward()
    state = {"exp_avg": torch.zeros(ELEMENTS + 2)}
    names = {tensor.name for tensor in _largest(20)}
    assert {"_Model inner.weight", "_Model inner.weight.grad", "_Holder.buffer", "'exp_avg' in a dict"} <= names
    assert holder.buffer.numel() < state["exp_avg"].numel()


def test_views_of_one_memory_count_once() -> None:
    model, buffer = _Model(), torch.zeros(2 * ELEMENTS)
    model.inner.weight.main_grad = buffer[:ELEMENTS]
    found = [tensor for tensor in _largest(20) if "main_grad" in tensor.name]
    assert [tensor.bytes for tensor in found] == [8 * ELEMENTS]


def test_what_torch_says_when_a_cpu_has_no_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**50)
    assert is_out_of_memory(found.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_every_key_that_is_advised_exists() -> None:
    keys = {key.name for key in config_keys(RunConfig)}
    advised = {change.key for changes in memory_advice._BY_PHASE.values() for change in changes}
    assert advised <= keys


def test_advice_is_about_the_innermost_phase_and_says_the_present_value() -> None:
    config = RunConfig()
    config.actor.max_tokens_per_micro_batch = 16384
    first = changes_for(config, ("step", "update_actor"))[0]
    assert first.describe(config) == "lower actor.max_tokens_per_micro_batch (now 16384)"
    assert changes_for(config, ("step", "gen"))[0].key == "rollout.max_num_seqs"
    assert changes_for(config, ())[0].key == "parallel.tensor_model_parallel_size"


def test_what_a_config_has_already_is_not_advised() -> None:
    config = RunConfig()
    keys = lambda: [change.key for change in changes_for(config, ("step", "update_actor"))]
    assert "model.recompute_granularity" in keys()
    config.model.recompute_granularity = "full"
    assert "model.recompute_granularity" not in keys()


def test_without_rl_nothing_of_generation_is_advised() -> None:
    config = RunConfig()
    config.trainer.kind = "sft"
    assert changes_for(config, ("testing",))[0].key == "actor.max_tokens_per_micro_batch"


def test_a_report_that_cannot_be_written_still_says_what_happened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config, timers = RunConfig(), Timers()
    config.trainer.default_local_dir = str(tmp_path / "file")
    try:
        with timers("step"), timers("update_actor"):
            _fail_holding(64)
    except torch.OutOfMemoryError as error:
        sentence = report_out_of_memory(error, config, 0)
    assert sentence.startswith("out of memory in update_actor; largest tensors are logits in _fail_holding")
    assert "the report could not be written" in sentence
