"""Processes that must not outlive their parent do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.launch import LIMIT_S, ROOT

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(3600)
"""
CHILD = "from megarl.processes.parent import die_with_parent; die_with_parent(); print(flush=True)\nwhile True: pass"


def test_the_kernel_kills_a_child_in_an_endless_loop_when_its_parent_is_killed() -> None:
    program = PARENT.format(child=CHILD)
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert ends(child)


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    program = f"from megarl.processes.parent import die_with_parent; die_with_parent({os.getpid() + 1})"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 1


def ends(pid: int, limit_s: float = LIMIT_S / 5) -> bool:
    """Whether a process ends; if not, it is killed."""
    deadline = time.monotonic() + limit_s
    while runs(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.05)
    return True


def runs(pid: int) -> bool:
    """Also false for a zombie: its parent, whatever that is now, has only to look."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
