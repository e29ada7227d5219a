"""Print what megarl depends on, a requirement a line: `python docker/requirements.py [extra …]`.

An image installs these before megarl's own files are copied, so that a change of those does not install them anew.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Of megarl and some of its extras.

    Raises:
        KeyError: there is no such extra.
    """
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [requirement for one in lists for requirement in one]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
