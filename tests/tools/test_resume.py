"""A conversion that was killed goes on: finished files stay as they are, and the result is that of an unbroken run."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import LIMIT_S, ROOT, torchrun
from tests.tiny_models import make_hf_model
from tests.tools.converters import TOOLS, convert, report, same_tensors, sentence, succeeded

KILL = "tests/tools/kill_in_conversion.py"
HF_TO_MEGATRON, MEGATRON_TO_HF = TOOLS / "hf_to_megatron.py", TOOLS / "megatron_to_hf.py"
SHARD = ("--max-shard-size", "60KB")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the verification's report."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "verify.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def finished(partial: Path) -> dict[str, tuple[int, int]]:
    """The files that the journal calls finished: their inodes and times of change."""
    names = [json.loads(path.read_text())["file"] for path in (partial / "journal").glob("*.json")]
    return {name: identity(partial / "content" / name) for name in names}


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a model, and the checkpoint and Hugging Face folder of unbroken runs of one process."""
    folder = tmp_path_factory.mktemp("resume")
    make_hf_model("qwen3_moe", folder / "hf", dtype=torch.bfloat16, num_hidden_layers=2)
    succeeded(convert("hf_to_megatron", "--hf", folder / "hf", "--out", folder / "checkpoint", *SHARD))
    succeeded(convert("megatron_to_hf", "--checkpoint", folder / "checkpoint", "--out", folder / "back", *SHARD))
    return folder


@pytest.fixture(scope="module")
def killed(folder):
    """What is left of a conversion to Megatron in one process that was killed at its third file."""
    arguments = [HF_TO_MEGATRON, "--hf", folder / "hf", "--out", folder / "killed", *SHARD]
    run = subprocess.run([sys.executable, ROOT / KILL, "3", *arguments], cwd=ROOT, capture_output=True, timeout=LIMIT_S)
    assert run.returncode == -9, run.stderr
    partial = folder / ".killed.partial"
    assert len(finished(partial)) == 2 and not (folder / "killed").exists()
    return partial


@pytest.fixture
def partial(killed):
    """A copy of that, to go on with; the target is `again`."""
    yield shutil.copytree(killed, killed.with_name(".again.partial"))
    for path in (killed.with_name(".again.partial"), killed.with_name("again")):
        shutil.rmtree(path, ignore_errors=True)


def go_on(folder: Path, *changes: object) -> subprocess.CompletedProcess[str]:
    return convert("hf_to_megatron", "--hf", folder / "hf", "--out", folder / "again", *SHARD, *changes)


def test_a_killed_conversion_to_megatron_goes_on_and_ends_as_if_unbroken(folder, partial):
    before = finished(partial)
    (partial / "content" / "weights" / ".__0_2.distcp.0badcafe").write_bytes(b"half a file")
    result = succeeded(go_on(folder))
    assert "goes on with 2 finished files" in result.stdout
    assert {name: identity(folder / "again" / name) for name in before} == before
    assert contents(folder / "again") == contents(folder / "checkpoint")
    assert not partial.exists()


def test_a_finished_file_that_has_changed_is_written_again(folder, partial):
    (name, *_) = finished(partial)
    file = partial / "content" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    result = succeeded(go_on(folder))
    assert f"{name} was finished by an earlier run, but has changed since; it is written again" in result.stdout
    assert contents(folder / "again") == contents(folder / "checkpoint")


def test_a_conversion_of_another_kind_does_not_go_on_with_it(folder, partial):
    before = contents(partial)
    said = sentence(go_on(folder, "--dtype", "float32"))
    assert said == (
        f"{partial} holds an unfinished conversion of another kind: dtype was torch.bfloat16 and is torch.float32; "
        "finish it as it was begun, or delete that folder to start anew"
    )
    assert contents(partial) == before


def test_nor_does_one_of_a_source_that_has_changed(folder, partial):
    moved = shutil.copytree(folder / "hf", folder / "other")
    said = sentence(convert("hf_to_megatron", "--hf", moved, "--out", folder / "again", *SHARD))
    assert f"source was {folder / 'hf'} and is {moved}" in said


def test_two_conversions_at_once_to_one_place_are_refused(folder, partial):
    with (partial / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = sentence(go_on(folder))
    assert said == f"another conversion is writing {folder / 'again'}; wait for it, or choose another --out"
    assert len(finished(partial)) == 2


def test_a_full_disk_keeps_what_is_finished_and_says_so(folder, partial):
    before = finished(partial)
    largest = max(path.stat().st_size for path in (folder / "checkpoint" / "weights").iterdir())
    result = convert(
        "hf_to_megatron", "--hf", folder / "hf", "--out", folder / "again", *SHARD, largest_file=largest - 1
    )
    assert sentence(result) == (
        f"cannot write {folder / 'again' / 'weights'}: File too large; {partial} keeps what is finished: run the same "
        "command again to go on, or delete it"
    )
    assert before.items() <= finished(partial).items()


def test_ranks_that_were_killed_go_on_each_with_its_own_files(folder):
    """Both ways in two processes; the way back goes on in another layout, and is verified."""
    arguments = ["--hf", folder / "hf", "--pp", 2, *SHARD, "--out"]
    torchrun(2, "tools/convert/hf_to_megatron.py", *arguments, folder / "unbroken")
    torchrun(2, KILL, 2, HF_TO_MEGATRON, *arguments, folder / "broken", check=False)
    before = finished(folder / ".broken.partial")
    assert before
    torchrun(2, "tools/convert/hf_to_megatron.py", *arguments, folder / "broken")
    assert {name: identity(folder / "broken" / name) for name in before} == before
    assert contents(folder / "broken") == contents(folder / "unbroken")

    arguments = ["--checkpoint", folder / "broken", *SHARD, "--out", folder / "broken-back"]
    torchrun(2, KILL, 2, MEGATRON_TO_HF, *arguments, "--ep", 2, check=False)
    before = finished(folder / ".broken-back.partial")
    assert before
    result = succeeded(convert("megatron_to_hf", *arguments, "--verify"))
    assert f"goes on with {len(before)} finished files" in result.stdout
    assert {name: identity(folder / "broken-back" / name) for name in before} == before
    assert contents(folder / "broken-back") == contents(folder / "back")
    assert same_tensors(folder / "hf", folder / "broken-back")
    assert report(folder / "broken-back")["ok"]


@pytest.mark.parametrize("size", ["5", "0GB", "5TB", "many"])
def test_a_shard_size_that_is_none_is_refused(folder, size):
    arguments = ["--hf", folder / "hf", "--out", folder / "none", "--max-shard-size", size]
    result = convert("hf_to_megatron", *arguments)
    assert result.returncode == 2
    assert f"'{size}' is no size; write a number with KB, MB or GB, such as 5GB" in result.stderr
