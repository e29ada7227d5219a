"""A batch script from one of the templates in launch/slurm, with its `#SBATCH` lines and settings filled in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parent / "slurm"

_ARGUMENTS = '"$@"'
"""Where a template takes what comes after its name on sbatch's command line."""


def render(
    template: str, options: Mapping[str, str | None], settings: Mapping[str, str], arguments: Sequence[str]
) -> str:
    """The text of a template, filled in.

    Args:
        template: its file name.
        options: of sbatch, by their long names without dashes; an empty value is one that takes none, and None removes
            the option from the template. No value may have a line break.
        settings: of the template's block of settings; those not named keep their defaults.
        arguments: for the program that the template runs.

    Raises:
        KeyError: the template has no such setting.
    """
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    for name, value in options.items():
        text = _with_option(text, name, value)
    for name, value in settings.items():
        pattern = re.compile(rf"^{name}=\$\{{{name}:-.*?\}}(?=\s)", re.MULTILINE)
        if not pattern.search(text):
            raise KeyError(f"{template} has no setting {name}")
        assignment = f"{name}={shlex.quote(value)}"
        text = pattern.sub(lambda match, new=assignment: new, text)
    return text.replace(_ARGUMENTS, f"{shlex.join(arguments)} {_ARGUMENTS}") if arguments else text


def _with_option(text: str, name: str, value: str | None) -> str:
    """With one option of sbatch replaced, added after the others, or removed."""
    lines = text.splitlines(keepends=True)
    is_option = re.compile(rf"#SBATCH --{re.escape(name)}(=|\s*$)")
    places = [i for i, line in enumerate(lines) if is_option.match(line)]
    # sbatch reads quotes as a shell does, and takes what follows an unquoted space for another option.
    argument = f"={shlex.quote(value)}" if value else ""
    new = [] if value is None else [f"#SBATCH --{name}{argument}\n"]
    place = places[0] if places else 1 + max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    return "".join([*lines[:place], *new, *lines[place + len(places) :]])


def option_of(template: str, name: str) -> str | None:
    """The value that a template gives to an option of sbatch, if it does."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    match = re.search(rf"^#SBATCH --{re.escape(name)}=(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def seconds_of(time: str) -> float:
    """Seconds of a time limit as Slurm writes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours, …

    Raises:
        ValueError: it is not one.
    """
    if time.lower() in ("infinite", "unlimited"):
        return float("inf")
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", time)
    if match is None:
        raise ValueError(f"{time!r} is no time limit: write e.g. 90 (minutes), 12:00:00 or 2-12:00:00")
    numbers = [int(number) for number in match[2].split(":")]
    if match[1] is None and len(numbers) < 3:
        numbers.insert(0, 0)  # without days, a single number is minutes, and two are minutes and seconds
    seconds = sum(number * unit for number, unit in zip(numbers, (3600, 60, 1), strict=False))
    total = int(match[1] or 0) * 86400 + seconds
    return float(total or "inf")  # 0 asks sbatch for no limit
