"""What the stand-in's names are: things that can be imported and not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def absent(name: str) -> Callable[..., NoReturn]:
    """A function that says that images need the real torchvision."""

    def raises(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} needs the real torchvision; this is its stand-in on a CPU")

    return raises


def absent_attribute(module: str, name: str) -> Callable[..., NoReturn]:
    """For a module's `__getattr__`: any public name is such a function."""
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(f"{module}.{name}")
