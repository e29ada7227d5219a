"""Registries: what a name finds, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from megarl.algorithms.registry import Registry


@dataclass(frozen=True)
class Traits:
    is_even: bool = False


NumberRegistry = Registry[Callable[[int], int], Traits]


def _registry() -> NumberRegistry:
    registry: NumberRegistry = Registry("number", "math.number", Traits, ("value",))
    registry("double", is_even=True)(lambda value: 2 * value)
    return registry


def test_a_decorated_function_is_found_by_name_and_left_as_it_is() -> None:
    registry = _registry()

    @registry("successor")
    def successor(value: int) -> int:
        return value + 1

    assert registry.get("successor") is successor and successor(1) == 2
    assert registry.names == ("double", "successor")


def test_an_entry_says_what_it_needs() -> None:
    assert _registry().traits("double") == Traits(is_even=True)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    for ask in (_registry().get, _registry().traits):
        with pytest.raises(ValueError, match=r"math.number is 'triple', but the numbers are double\."):
            ask("triple")


def test_a_name_cannot_be_given_twice() -> None:
    with pytest.raises(ValueError, match=r"the number 'double' of .*test_registry.py already exists in .*registry.py"):
        _registry()("double")(lambda value: 3 * value)


def test_a_function_that_cannot_be_called_as_an_entry_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'sum' of .*test_registry.py takes \(a, b\), but it is called with \(value\)"
    ):
        _registry()("sum")(lambda a, b: a + b)  # type: ignore[misc,arg-type]
    _registry()("power")(lambda value, exponent=2: value**exponent)


def test_a_trait_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'zero' of .*test_registry.py is registered with what does not exist: .*is_odd"
    ):
        _registry()("zero", is_odd=True)(lambda value: 0)
