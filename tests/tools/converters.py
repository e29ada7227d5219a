"""Starts the converters as a person would."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.launch import LIMIT_S, ROOT

TOOLS = ROOT / "tools" / "convert"
_WITHOUT_TORCHRUN = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}


def convert(tool: str, *arguments: object, largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a tool in one process.

    Args:
        largest_file: bytes that a file may have, where a disk is to run full.
    """

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))  # type: ignore[arg-type]

    return subprocess.run(
        [sys.executable, "-X", "faulthandler", TOOLS / f"{tool}.py", *map(str, arguments)],
        env=_WITHOUT_TORCHRUN,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        preexec_fn=None if largest_file is None else limit,
    )


def sentence(result: subprocess.CompletedProcess[str]) -> str:
    """What a refused conversion said: one line on stderr, and exit status 2."""
    assert result.returncode == 2, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def succeeded(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result


def report(folder: Path) -> dict:
    return json.loads((folder / "verify.json").read_text())


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder, read by the safetensors library."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same_tensors(a: Path, b: Path) -> bool:
    left, right = tensors(a), tensors(b)
    same = lambda x, y: x.dtype == y.dtype and torch.equal(x, y)
    return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
