"""A config and its keys as text: the resolved YAML, what a run will do, and the reference of all keys."""

import os
import sys
import textwrap
import typing
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import OmegaConf

from megarl.config.batches import BatchPlan
from megarl.config.fields import Key, config_keys
from megarl.config.schema import RunConfig

_TEXT_WIDTH = 100


def print_text(text: str) -> None:
    """Prints to stdout; a reader that has read enough, such as `| head`, is no failure."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python would print a traceback again when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the config, for documentation."""

    name: str
    doc: str
    keys: list[Key]


def config_sections() -> list[Section]:
    """All sections of a `RunConfig` with their keys, in the order they are written in."""
    hints = typing.get_type_hints(RunConfig)
    return [
        Section(
            name=item.name,
            doc=" ".join((hints[item.name].__doc__ or "").split()),
            keys=list(config_keys(hints[item.name], f"{item.name}.")),
        )
        for item in fields(RunConfig)
    ]


def to_yaml(config: RunConfig) -> str:
    """The config with every key, as YAML that `load_config` reads back to the same config."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def describe_run(config: RunConfig, world_size: int) -> str:
    """The layout and the batch arithmetic of a valid config, in words; one fact a line."""
    layout = config.parallel.layout(world_size)
    return f"layout: {layout.describe()}\n{BatchPlan.of(config, layout).describe()}"


def key_help(section: Section) -> str:
    """A section's keys for a terminal."""
    paragraphs = [f"{section.name}: {section.doc}"]
    for key in section.keys:
        text = textwrap.fill(key.doc, _TEXT_WIDTH, initial_indent="    ", subsequent_indent="    ")
        paragraphs.append(f"  {key.name}={show_value(key.default)}   ({_expected(key)})\n{text}")
    return "\n\n".join(paragraphs)


def reference_markdown() -> str:
    """`docs/configuration.md`: every key with its type, default and documentation."""
    lines = [
        "# Configuration",
        "",
        "Every key of a run, with its default. Made by `python tools/config_reference.py` from the strings under the",
        "fields in `megarl/config`; change those, not this file.",
        "",
        "A YAML file holds these sections; `base: other.yaml` (relative to the file) names a file that it builds on,",
        "and `key=value` on the command line comes last. Batch sizes are global: they count prompts over all ranks.",
    ]
    for section in config_sections():
        lines += ["", f"## {section.name}", "", section.doc, ""]
        lines += [
            f"- **`{key.name}`** (default `{show_value(key.default)}`; {_expected(key)}): {key.doc}"
            for key in section.keys
        ]
    return "\n".join(lines) + "\n"


def show_value(value: Any) -> str:
    """A default as one would write it in YAML or on the command line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(show_value, value))}]"
        case "":
            return '""'
        case _:
            return str(value)


def _expected(key: Key) -> str:
    rules = key.rules
    if rules.choices:
        choices = " | ".join(rules.choices)
        return f"any of {choices}" if isinstance(key.default, list) else choices
    bounds = (("at least", rules.at_least), ("above", rules.above), ("at most", rules.at_most))
    return ", ".join([key.expected, *(f"{words} {bound}" for words, bound in bounds if bound is not None)])
