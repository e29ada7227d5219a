"""Ranks and reward workers are killed at random, and the run ends with the weights of one that was left in peace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, environment


@pytest.mark.timeout(600)
def test_after_every_kind_of_kill_a_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Seed 1 draws a reward worker, a rank that is killed again as it starts, and the other rank."""
    command = [sys.executable, "benchmarks/soak.py", "--kills", "3", "--seed", "1", "--keep", str(tmp_path)]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "figures.json")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=590,
    )
    log = tmp_path / "killed" / "log.txt"
    assert result.returncode == 0, result.stdout + result.stderr + (log.read_text() if log.exists() else "")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["kills of ranks"] == 2
    assert figures["kills of ranks that start again"] == 1
    assert figures["kills of reward workers"] == 1
    # Of actor and critic: 4 layers of 12 tensors, the embedding, the last norm, and the head; the critic's has a bias.
    assert figures["tensors compared"] == 2 * (4 * 12 + 3) + 1
    assert figures["tensors that differ"] == 0
    assert "is gone, killed or crashed; it was last seen in" in log.read_text()
