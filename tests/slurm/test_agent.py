"""torchrun as jobs start it: what it says where the nodes do not find one another."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.launch import ROOT, environment


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("is_host=1,join_timeout=1", "not all nodes of the job have come in time"),
        ("is_host=0,read_timeout=1", "it is not reached from here: the first node has ended"),
    ],
    ids=["the other node does not come", "the first node is not there"],
)
def test_a_node_that_is_alone_says_so_in_one_sentence(settings: str, reason: str) -> None:
    place = f"127.0.0.1:{free_port()}"
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=1", f"--rdzv-endpoint={place}"]
    result = subprocess.run(
        [sys.executable, ROOT / "launch" / "slurm" / "agent.py", *options, f"--rdzv-conf={settings}", "never.py"],
        env={**environment(), "RENDEZVOUS": place},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 1
    assert f"node {socket.gethostname()}: the nodes were to meet at {place}, but {reason}" in result.stderr
    assert "Traceback" not in result.stderr
