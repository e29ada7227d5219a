"""What a rank and its engine's server process say to one another, pickled, over one connection.

Imports neither torch nor SGLang, so that reading a message cannot need what the other side has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """To the server: draw one response."""

    key: int
    """Comes back with it."""
    prompt_ids: list[int]
    sampling: dict[str, Any]
    """SGLang's sampling parameters."""
    is_cut: bool
    """Whether top-p or top-k cut the distribution, so that log-probs need the mass of what was left."""
    routed_experts: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """From the server: one response."""

    key: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """SGLang's: stop, length or abort."""
    weight_versions: list[tuple[int, str]]
    """Where each span begins, in response tokens, and the version that drew it; empty where there are no tokens."""
    routed_experts: bytes | None
    """[prompt + response − 1, layers, top-k] int32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """From the server: a response that cannot be drawn."""

    key: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """To the server: end all responses now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """To the server: do one thing and answer."""

    number: int
    method: str
    """A public method of `server.Server`."""
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """From the server: the outcome of a call; of number 0 it is that of starting."""

    number: int
    problem: str | None
    """None: it was done."""
