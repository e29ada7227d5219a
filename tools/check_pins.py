"""Ask the package index whether it has every version that docker/constraints.txt names: `python tools/check_pins.py`.

Uses pip, and so the index that pip is set up with. Takes a second for each package.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "docker" / "constraints.txt"

_PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)")


def main() -> int:
    """Returns the exit status: 0 if the index has all, 1 if not, 2 if the file cannot be read."""
    try:
        pins = read_pins(CONSTRAINTS)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    missing = 0
    for name, version in pins.items():
        versions = versions_of(name)
        is_there = version in versions
        missing += not is_there
        print(f"{name} {version}: {'there' if is_there else _absence(versions)}", flush=True)
    print(f"{len(pins) - missing} of {len(pins)} versions are there")
    return 1 if missing else 0


def read_pins(file: Path) -> dict[str, str]:
    """Version by package.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is neither a comment nor `name==version`, or names a package again.
    """
    pins: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _PIN.fullmatch(text)
        if match is None:
            raise ValueError(f"{file}, line {number}: {text!r} is not of the form name==version.")
        if match["name"] in pins:
            raise ValueError(f"{file}, line {number}: {match['name']} has a version already; remove one of them.")
        pins[match["name"]] = match["version"]
    return pins


def versions_of(name: str) -> list[str]:
    """All versions of a package that the index has, the newest first; none if it does not know the package."""
    result = subprocess.run(
        # --ignore-requires-python: those that an image needs are for its Python, not for this one.
        [sys.executable, "-m", "pip", "index", "versions", "--ignore-requires-python", "--pre", name],
        capture_output=True,
        text=True,
    )
    return available_versions(result.stdout)


def available_versions(output: str) -> list[str]:
    """From what `pip index versions` prints."""
    match = re.search(r"^Available versions: (.*)$", output, re.MULTILINE)
    return [version.strip() for version in match[1].split(",")] if match else []


def _absence(versions: list[str]) -> str:
    return f"not there; the newest is {versions[0]}" if versions else "the index does not know the package"


if __name__ == "__main__":
    sys.exit(main())
