"""Functions found by the name that the config gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[F, T]):
    function: F
    traits: T


class Registry(Generic[F, T]):
    """Entries by name. An instance is a decorator: `@advantage_estimator("gae", needs_values=True)`.

    A file of your own adds an entry in the same way, as soon as it is imported (`megarl.algorithms.plugins`).
    """

    def __init__(self, kind: str, key: str, traits: type[T], parameters: tuple[str, ...]) -> None:
        """An empty registry.

        Args:
            kind: what an entry is, in words, e.g. `advantage estimator`.
            key: the key of the config that holds the name.
            traits: a dataclass of what an entry may say about itself, e.g. which inputs it needs.
            parameters: names of the positional arguments that every entry is called with.
        """
        self.kind = kind
        self.key = key
        self._traits_type = traits
        self._parameters = parameters
        self._entries: dict[str, _Entry[F, T]] = {}

    def __call__(self, name: str, **traits: Any) -> Callable[[F], F]:
        """Registers the decorated function.

        Args:
            name: what the config calls it.
            traits: fields of the registry's traits.

        Raises:
            ValueError: the name is taken (two files with one name would otherwise depend on the order of imports), or
                the function cannot be called with this registry's arguments, or there is no such trait.
        """

        def register(function: F) -> F:
            taken = self._entries.get(name)
            if taken is not None:
                raise ValueError(
                    f"the {self.kind} '{name}' of {_file_of(function)} already exists in {_file_of(taken.function)}: "
                    "choose another name"
                )
            self._check_signature(name, function)
            try:
                described = self._traits_type(**traits)
            except TypeError as error:
                raise ValueError(
                    f"the {self.kind} '{name}' of {_file_of(function)} is registered with what does not exist: {error}"
                ) from None
            self._entries[name] = _Entry(function, described)
            return function

        return register

    def get(self, name: str) -> F:
        """The entry of that name.

        Raises:
            ValueError: there is none; the message lists those there are.
        """
        return self._entry(name).function

    def traits(self, name: str) -> T:
        """What the entry of that name says about itself.

        Raises:
            ValueError: there is none; the message lists those there are.
        """
        return self._entry(name).traits

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of registration."""
        return tuple(self._entries)

    def _entry(self, name: str) -> _Entry[F, T]:
        if name not in self._entries:
            plural = f"{self.kind}es" if self.kind.endswith("s") else f"{self.kind}s"
            raise ValueError(f"{self.key} is '{name}', but the {plural} are {', '.join(self.names)}.")
        return self._entries[name]

    def _check_signature(self, name: str, function: F) -> None:
        try:
            inspect.signature(function).bind(*self._parameters)
        except TypeError:
            raise ValueError(
                f"the {self.kind} '{name}' of {_file_of(function)} takes {inspect.signature(function)}, but it is "
                f"called with ({', '.join(self._parameters)})"
            ) from None


def _file_of(function: Callable[..., object]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return repr(function) if code is None else str(code.co_filename)
