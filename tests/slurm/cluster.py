"""A real Slurm of two nodes on this machine, on the loopback interface, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megarl.processes.parent import die_with_parent
from tests.launch import LIMIT_S, free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo", "scancel")
_POLL_S = 0.1
_SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing_reason() -> str | None:
    """Why there can be no cluster here; None if there can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_SEARCHED) is None]
    if missing:
        return f"{missing[0]} is not installed: run tests/slurm/install.sh as root"
    return None if os.geteuid() == 0 else "slurmd has to be started by root"


class Cluster:
    """The commands of a running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": _SEARCHED, "SLURM_CONF": str(folder / "slurm.conf")}

    def command(self, *arguments: object, **options: object) -> str:
        """Runs a command of Slurm; returns what it printed.

        Raises:
            AssertionError: it failed.
        """
        result = subprocess.run(
            [str(argument) for argument in arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            **options,
        )
        assert result.returncode == 0, f"{arguments} failed: {result.stdout}{result.stderr}"
        return result.stdout

    def job_state(self, job: str) -> str:
        """E.g. PENDING, RUNNING, COMPLETED."""
        match = re.search(r"JobState=(\S+)", self.command("scontrol", "show", "job", job))
        assert match is not None
        return match[1]

    def wait(self, what: str, condition: Callable[[], bool], job: str, limit_s: float = LIMIT_S) -> None:
        """Waits until something is so.

        Raises:
            AssertionError: it did not become so, or the job ended before.
        """
        deadline = time.monotonic() + limit_s
        while not condition():
            state = self.job_state(job)
            over = state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") or time.monotonic() > deadline
            assert not over, f"waited for: {what}; job {job} is {state}:\n{self._situation(job)}"
            time.sleep(_POLL_S)

    def _situation(self, job: str) -> str:
        log = (self.folder / "slurmctld.log").read_text(errors="replace")[-2000:]
        return "\n".join([self.command("scontrol", "show", "job", job), self.command("sinfo", "--Node", "--long"), log])


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Starts a cluster; ends every process of it at the end, and of the jobs that still run, whatever happens."""
    # Not pytest's folder, which only its owner may enter: munge wants its socket where everybody could connect.
    folder = Path(tempfile.mkdtemp(prefix="megarl-slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _write_config(folder)
        for command in _daemons(folder):
            # In the foreground, and gone with this process even if it is killed.
            daemons.append(
                subprocess.Popen(
                    command,
                    env=cluster.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    preexec_fn=die_with_parent,
                )
            )
            if command[0] == "munged":
                _wait_for(lambda: (folder / "munge.socket").exists(), folder)
        _wait_for(lambda: _idle_nodes(cluster) == 2, folder)
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.kill()
            daemon.wait()
        _kill_leftovers(str(folder))
        shutil.rmtree(folder, ignore_errors=True)


def _write_config(folder: Path) -> None:
    names = ("CTLD_PORT", "N1_PORT", "N2_PORT")
    values = {"DIR": str(folder), "HOST": socket.gethostname(), **dict(zip(names, free_ports(3), strict=True))}
    text = (Path(__file__).parent / "slurm.conf").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def _daemons(folder: Path) -> list[list[str]]:
    files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
    options = [f"--{name}{'' if name == 'socket' else '-file'}={folder}/munge.{end}" for name, end in files.items()]
    nodes = [["slurmd", "-D", "-N", name] for name in ("n1", "n2")]
    return [["munged", "--foreground", *options], ["slurmctld", "-D"], *nodes]


def _idle_nodes(cluster: Cluster) -> int:
    result = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--states=idle"], env=cluster.environment, capture_output=True, text=True
    )
    return len(result.stdout.split("\n")) - 1 if result.returncode == 0 else 0


def _wait_for(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(file.read_text(errors="replace")[-2000:] for file in sorted(folder.glob("*.log")))
            raise AssertionError(f"the cluster did not start within {LIMIT_S:g} s:\n{logs}")
        time.sleep(_POLL_S)


def _kill_leftovers(folder: str) -> None:
    """Kills what the daemons had started: steps go on when slurmd ends."""
    for pid in processes_that_know(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_that_know(*texts: str) -> list[int]:
    """Processes in whose environment and command line all texts are; those of a cluster know its folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or not ours to look at
            known = (process / "environ").read_bytes() + b"\0" + (process / "cmdline").read_bytes()
            if all(text.encode() in known for text in texts) and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found
