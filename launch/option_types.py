"""Types for argparse: options that are numbers, with limits, and a sentence for each number that is outside of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """The type of a finite number above 0; `kind` is int or float."""

    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
        return value

    parse.__name__ = kind.__name__  # argparse names it where a text is no number at all
    return parse


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of a whole number from `least` to `most`, which may be without end."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most}")
        return value

    parse.__name__ = int.__name__  # as above
    return parse
