"""What the group of weights asks of NCCL, which a torch without CUDA does not have, and what it replaces in SGLang."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch._C._distributed_c10d import Backend

from megarl.rollout.sglang.environment import CPU_STANDINS
from tests.launch import LIMIT_S, ROOT

STUBS = Path(torch.__file__).with_name("_C") / "_distributed_c10d.pyi"
"""Torch's own description of its backends, NCCL's too."""


def class_of(body: list[ast.stmt], name: str) -> ast.ClassDef:
    (found,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def arguments_of(definition: ast.ClassDef, method: str) -> list[str]:
    (found,) = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == method]
    return [argument.arg for argument in found.args.args]


def test_nccls_group_is_made_as_torch_describes_it() -> None:
    module = ast.parse(STUBS.read_text(encoding="utf-8")).body
    nccl = class_of(module, "ProcessGroupNCCL")
    assert arguments_of(nccl, "__init__") == ["self", "store", "rank", "size", "options"]
    assert arguments_of(nccl, "abort") == ["self"]
    options = class_of(nccl.body, "Options")
    assert arguments_of(options, "__init__") == ["self", "is_high_priority_stream"]
    assert [ast.unparse(base) for base in options.bases] == ["Backend.Options"]
    assert isinstance(Backend.Options._timeout, property) and Backend.Options._timeout.fset is not None


def test_nccls_group_broadcasts_as_gloos_does() -> None:
    """It takes both from their common base, of which the tests use gloo's."""
    module = ast.parse(STUBS.read_text(encoding="utf-8")).body
    assert [ast.unparse(base) for base in class_of(module, "ProcessGroupNCCL").bases] == ["Backend"]
    assert "tensor: torch.Tensor, root:" in str(Backend.broadcast.__doc__)


REPLACED = """
import inspect
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
names = ["update_weights_from_tensor", "init_weights_update_group", "destroy_weights_update_group"]
before = {name: getattr(WeightUpdater, name) for name in names}
from megarl.rollout.sglang import scheduler
scheduler._take_checked_buckets()
scheduler._join_update_groups_in_time()
for name, original in before.items():
    ours = getattr(WeightUpdater, name)
    assert ours is not original
    print(name, list(inspect.signature(ours).parameters) == list(inspect.signature(original).parameters))
"""


def test_what_replaces_a_method_of_sglang_takes_the_same_arguments() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(CPU_STANDINS)]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", REPLACED]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr[-4000:]
    assert [line.split()[-1] for line in result.stdout.splitlines()[-3:]] == ["True"] * 3
