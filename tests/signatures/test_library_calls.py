"""Calls of libraries that megarl pins are what the installed versions take, also those that only a GPU run makes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megarl.rollout.sglang.environment import CPU_STANDINS
from tests.launch import LIMIT_S, ROOT

PROGRAM = ROOT / "tests" / "signatures" / "library_calls.py"


def check(folder: Path, *packages: str) -> list[str]:
    """The lines of the program: problems, and at last how much it has seen."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(CPU_STANDINS)]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(folder), *packages]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("packages", "at_least"), [(("megatron", "mbridge"), 80), (("sglang",), 25)], ids=["megatron and mbridge", "sglang"]
)
def test_every_call_in_megarl_fits_the_installed_package(packages: tuple[str, ...], at_least: int) -> None:
    if packages == ("sglang",):
        assert find_spec("sglang"), "source launch/setup_sglang_cpu.sh"
    *problems, seen = check(ROOT / "megarl", *packages)
    assert problems == []
    assert int(seen.split()[0]) >= at_least, "the program no longer sees what there is to see"


WRONG = """
from megatron.core import parallel_state
from megatron.core.utils import get_pg_rank, get_pg_blank
from megatron.core.optimizer import OptimizerConfig

parallel_state.initialize_model_parallel(tensor_parallel_size=2)
parallel_state.destroy_everything()
OptimizerConfig(optimizer="adam", learning_speed=1)
get_pg_rank(None, 1)
get_pg_rank(None)
"""


def test_names_and_arguments_that_are_not_there_are_found(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    *problems, _ = check(tmp_path, "megatron")
    found = {int(problem.split(":")[1]): problem for problem in problems}
    assert set(found) == {3, 6, 7, 8, 9}
    assert "get_pg_blank" in found[3] and "tensor_parallel_size" in found[6]
    assert "destroy_everything" in found[7] and "learning_speed" in found[8]
