"""Functions found by the name that the config gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Entries by name. An instance is a decorator: `@advantage_estimator("grpo")`.

    A file of your own adds an entry in the same way, as soon as it is imported.
    """

    def __init__(self, kind: str, key: str) -> None:
        """An empty registry.

        Args:
            kind: what an entry is, in words, e.g. `advantage estimator`.
            key: the key of the config that holds the name.
        """
        self.kind = kind
        self.key = key
        self._entries: dict[str, F] = {}

    def __call__(self, name: str) -> Callable[[F], F]:
        """Registers the decorated function.

        Raises:
            ValueError: the name is taken. Two files with one name would otherwise depend on the order of imports.
        """

        def register(function: F) -> F:
            taken = self._entries.get(name)
            if taken is not None:
                raise ValueError(
                    f"the {self.kind} '{name}' of {function.__module__} already exists in {taken.__module__}: "
                    "choose another name"
                )
            self._entries[name] = function
            return function

        return register

    def get(self, name: str) -> F:
        """The entry of that name.

        Raises:
            ValueError: there is none; the message lists those there are.
        """
        if name not in self._entries:
            raise ValueError(f"{self.key} is '{name}', but the {self.kind}s are {', '.join(self.names)}.")
        return self._entries[name]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of registration."""
        return tuple(self._entries)
