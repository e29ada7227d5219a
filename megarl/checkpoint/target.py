"""Whether something can be written under a name, asked before any work is done. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from megarl.config.errors import ConfigError


def check_target(target: str | Path) -> None:
    """Refuses a target that exists or cannot be made.

    Raises:
        ConfigError: it exists, or the nearest folder above it is none or not writable.
    """
    target = Path(target)
    # A broken link "does not exist", but a rename would not create what it points to either.
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists, and nothing is overwritten; choose another --out, or remove it first.")
    above = next(parent for parent in target.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"{target} cannot be made, since {above} is a file; choose another --out.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{target} cannot be made, since {above} is not writable; choose another --out.")
