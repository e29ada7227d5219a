"""Which process a number means: numbers are used again."""

from __future__ import annotations

from pathlib import Path


def start_of(pid: int) -> str | None:
    """When a process started, in ticks since the boot, with the boot's id; None where there is no such process.

    A process that has ended and that its parent has not looked at yet (a zombie) counts as ended.
    """
    try:
        # The name, in parentheses, may hold anything; the state is the first field after it, the start the 20th.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX":
            return None
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {fields[19]}"
    except (OSError, IndexError):
        return None
