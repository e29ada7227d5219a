"""What a rank and an engine's server process say to one another, as JSON, over one connection.

Not pickled: a server of its own listens on a port, and unpickling does whatever the sender says. Imports neither torch
nor SGLang, so that reading a message cannot need what the other side has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """To a server of its own, first of all: who comes."""

    facts: Mapping[str, Any]
    """What both sides have to have alike (`facts.engine_facts`)."""


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
    weight_versions: Sequence[tuple[int, str]]
    """Where each span begins, in response tokens, and the version that drew it; empty where there are no tokens."""
    routed_experts: str | None
    """[prompt + response − 1, layers, top-k] int32, in base64."""


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
    """From the server: the outcome of a call; of number 0 it is that of starting, or of `Hello`."""

    number: int
    problem: str | None
    """None: it was done."""


Message = Hello | Draw | Drawn | Refused | Abort | Call | Answer
_KINDS = {kind.__name__: kind for kind in (Hello, Draw, Drawn, Refused, Abort, Call, Answer)}


def encode(messages: Sequence[Message]) -> bytes:
    """The bytes that `decode` reads."""
    return json.dumps([[type(m).__name__, {f.name: getattr(m, f.name) for f in fields(m)}] for m in messages]).encode()


def decode(data: bytes) -> list[Message]:
    """Messages that `encode` wrote; tuples come as lists.

    Raises:
        ValueError: it did not.
    """
    try:
        return [_KINDS[kind](**values) for kind, values in json.loads(data)]
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"these are no messages of an engine: {error}") from None
