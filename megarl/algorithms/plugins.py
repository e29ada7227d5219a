"""Advantage estimators and losses from a person's own file, by name, without a change to megarl."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from megarl.algorithms.advantages import advantage_estimator
from megarl.algorithms.policy_loss import policy_loss
from megarl.algorithms.preference import preference_loss

_REGISTRIES = (advantage_estimator, policy_loss, preference_loss)


def load_plugins(paths: Sequence[str | Path], key: str) -> None:
    """Imports Python files that register estimators or losses:

        from megarl.algorithms.advantages import advantage_estimator

        @advantage_estimator("mine", row_level=True)
        def mine(inputs, options): ...

    A file that this process has loaded before is not imported again.

    Args:
        paths: the files; relative ones are relative to the working directory.
        key: the key of the config that names them, for messages.

    Raises:
        ValueError: one sentence. A file that does not exist, that fails when imported, or that registers nothing; a
            name that exists already; a function that cannot be called as an entry of its registry.
    """
    for path in paths:
        _load(Path(path).expanduser(), key)


def _load(path: Path, key: str) -> None:
    if not path.is_file():
        raise ValueError(f"{key}: {path} does not exist.")
    # The name holds the whole path, since two folders may each have a losses.py.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"megarl_plugin_{path.stem}_{digest}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{key}: {path} is not a Python file; its name has to end in .py.")
    before = _registered()
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses look up their module there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{key}: {path}{_line_of(error, path)} fails: {_in_words(error).rstrip('.')}.") from error
    if _registered() == before:
        del sys.modules[name]
        raise ValueError(
            f"{key}: {path} registers nothing; decorate a function with @advantage_estimator(name) of "
            "megarl.algorithms.advantages, @policy_loss(name) of megarl.algorithms.policy_loss or "
            "@preference_loss(name) of megarl.algorithms.preference."
        )


def _registered() -> int:
    return sum(len(registry.names) for registry in _REGISTRIES)


def _line_of(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f", line {error.lineno},"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}," if lines else ""


def _in_words(error: Exception) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
