"""A reward function of the user's own, from `reward.custom.path` and `reward.custom.name`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from megarl.rewards.graders import ScoreFunction

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What a reward function is called with, by name."""

_MODULE_NAME = "megarl_custom_reward"
"""In `sys.modules`, where pickling and dataclasses look for the file's classes."""


class SetupError(Exception):
    """Why a worker cannot score anything: one sentence for the person who wrote the config."""


def load_function(path: str, name: str) -> ScoreFunction:
    """The function `name` of the Python file `path`. The file's folder becomes importable for it.

    Raises:
        SetupError: no such file or function, a file that cannot be imported, or a signature that does not take
            `ARGUMENTS` by name.
    """
    file = Path(path)
    if not file.is_file():
        raise SetupError(f"reward.custom.path {path} is not a file (looked for from {Path.cwd()}).")
    module = _import(file)
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == _MODULE_NAME
        ]
        near = get_close_matches(name, own, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"its functions are: {', '.join(own) or 'none'}."
        raise SetupError(f"reward.custom.path {path} has no function '{name}' (reward.custom.name): {hint}")
    _check_signature(function, path, name)
    return function


def is_async(function: ScoreFunction) -> bool:
    """Whether calls of it are coroutines, so that many may run at once."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _import(file: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(_MODULE_NAME, file)
    if specification is None or specification.loader is None:
        raise SetupError(f"reward.custom.path {file} is not a Python file: its name has to end in .py.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[_MODULE_NAME] = module
    sys.path.append(str(file.resolve().parent))  # last: a neighbour called random.py must not replace Python's own
    try:
        specification.loader.exec_module(module)
    except BaseException as error:  # sys.exit at the top of a script is an answer too
        raise SetupError(
            f"reward.custom.path {file} cannot be imported: {_describe(error, specification.origin)}."
        ) from error
    return module


def _describe(error: BaseException, file: str | None) -> str:
    """`line 3: NameError: name 'x' is not defined`, with the last line of the user's file that was reached."""
    what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1].rstrip(".")
    if isinstance(error, SyntaxError):
        line = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == file), None)
    return what if line is None else f"line {line}: {what}"


def _check_signature(function: ScoreFunction, path: str, name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a C function has none to look at
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise SetupError(
            f"reward.custom: {name}{signature} in {path} cannot be called with {', '.join(ARGUMENTS)} ({error}): "
            f"define it as {name}(data_source, solution_str, ground_truth, extra_info=None)."
        ) from None
