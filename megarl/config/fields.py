"""What a field of the config may say about itself, and how its documentation and rules are read back."""

import ast
import functools
import inspect
import itertools
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any

_RULES = "megarl"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the value of one field must satisfy, whatever the other fields hold. None (null) has none."""

    choices: tuple[str, ...] = ()
    """The values allowed; for a list, those of its items."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    local_path: bool = False
    """A path, or a list of paths, in which `~` stands for the home folder."""


def rules(**given: Any) -> dict[str, Rules]:
    """`Rules`, given as keywords, in the form that `dataclasses.field` takes as `metadata`."""
    return {_RULES: Rules(**given)}


def setting(default: Any, **given: Any) -> Any:
    """A dataclass field with a default and `Rules`, given as keywords."""
    return field(default=default, metadata=rules(**given))


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the config."""

    name: str
    """Dotted, e.g. `actor.clip_ratio_low`."""
    annotation: Any
    rules: Rules
    doc: str
    """The string under the field, on one line."""
    default: Any

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        return describe_type(self.annotation)

    @property
    def entry_class(self) -> type | None:
        """Where the value is a list of settings, such as guard.rules: the dataclass of one of them."""
        items = typing.get_args(self.annotation) if typing.get_origin(self.annotation) is list else ()
        return typing.cast(type, items[0]) if items and is_dataclass(items[0]) else None

    def entry_keys(self, number: int) -> Iterator["Key"]:
        """The keys of an entry of a list of settings, named after its place in the list."""
        return config_keys(typing.cast(type, self.entry_class), f"{self.name}[{number}].")


def config_keys(config_class: type, prefix: str = "", defaults: Any = None) -> Iterator[Key]:
    """Every key of a config dataclass and of the dataclasses in its fields, in the order they are written in.

    Args:
        defaults: an instance that holds the default values; that of the class itself if not given.
    """
    hints, docs = typing.get_type_hints(config_class), field_docs(config_class)
    defaults = config_class() if defaults is None else defaults
    for item in fields(config_class):
        name, annotation, default = f"{prefix}{item.name}", hints[item.name], getattr(defaults, item.name)
        if is_dataclass(annotation):
            # A section may give another one's fields defaults of its own (critic.optim).
            yield from config_keys(typing.cast(type, annotation), f"{name}.", default)
            continue
        yield Key(
            name=name,
            annotation=annotation,
            rules=item.metadata.get(_RULES, Rules()),
            doc=docs[item.name],
            default=default,
        )


def describe_type(annotation: Any) -> str:
    """A field's type in words, e.g. `a whole number or null`."""
    if isinstance(annotation, UnionType):
        inner = [part for part in typing.get_args(annotation) if part is not NoneType]
        return " or ".join([*map(describe_type, inner), "null"])
    if typing.get_origin(annotation) is list:
        (item,) = typing.get_args(annotation)
        if is_dataclass(item):
            return f"a list of {{{', '.join(part.name for part in fields(item))}}}"
        return {str: "a list of texts", float: "a list of numbers", int: "a list of whole numbers"}[item]
    if typing.get_origin(annotation) is dict:
        return "settings by name"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[annotation]


@functools.cache
def field_docs(config_class: type) -> dict[str, str]:
    """The string literal under each field of a dataclass, on one line, by field name; those of its bases too.

    Python throws these strings away, so they are read from the source.
    """
    bases = (base for base in config_class.__bases__ if is_dataclass(base))
    docs = {name: doc for base in bases for name, doc in field_docs(base).items()}
    (definition,) = ast.parse(inspect.getsource(config_class)).body
    assert isinstance(definition, ast.ClassDef)
    for statement, following in itertools.pairwise(definition.body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs
