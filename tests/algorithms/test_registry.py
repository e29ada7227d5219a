"""Registries: what a name finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megarl.algorithms.registry import Registry


def _registry() -> Registry[Callable[[int], int]]:
    registry: Registry[Callable[[int], int]] = Registry("number", "math.number")
    registry("double")(lambda value: 2 * value)
    return registry


def test_a_decorated_function_is_found_by_name_and_left_as_it_is() -> None:
    registry = _registry()

    @registry("successor")
    def successor(value: int) -> int:
        return value + 1

    assert registry.get("successor") is successor and successor(1) == 2
    assert registry.names == ("double", "successor")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"math.number is 'triple', but the numbers are double\."):
        _registry().get("triple")


def test_a_name_cannot_be_given_twice() -> None:
    with pytest.raises(ValueError, match=r"the number 'double' of tests.algorithms.test_registry already exists"):
        _registry()("double")(lambda value: 3 * value)
