"""A run's checkpoint holds exactly the step's state, whole or not at all, and shows every damage."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.checkpoint import training_ranks as ranks
from tests.spawn import run_ranks
from tests.tiny_models import make_hf_model


def flip_a_bit(folder: Path) -> None:
    file = folder / "optimizer" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(folder: Path) -> None:
    file = folder / "weights" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:300])


def remove_generators(folder: Path) -> None:
    shutil.rmtree(folder / "rng")


def remove_half(folder: Path) -> None:
    shutil.rmtree(folder / "weights")


def remove_list(folder: Path) -> None:
    (folder / "files.json").unlink()


def cut_list(folder: Path) -> None:
    file = folder / "files.json"
    file.write_text(file.read_text()[:50])


def make_newer(folder: Path) -> None:
    file = folder / "files.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": 99}))


def leave_as_it_is(folder: Path) -> None:
    pass


DAMAGES = {
    "flipped bit": (flip_a_bit, "optimizer/__0_0.distcp has other bytes than were written"),
    "truncated": (truncate, "weights/__0_0.distcp has 300 bytes instead of"),
    "no generators": (remove_generators, "rng/rank-00000.pt is missing (2 files are wrong)"),
    "half deleted": (remove_half, "is missing (5 files are wrong)"),
    "no list": (remove_list, "there is no files.json"),
    "cut list": (cut_list, "files.json is not what was written"),
    "newer format": (make_newer, "refused: "),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen2_tied", "qwen3_moe"):
        make_hf_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def two(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Where two ranks saved, and what each found."""
    folder = tmp_path_factory.mktemp("two")
    edits = {**{name: edit for name, (edit, _) in DAMAGES.items()}, "whole": leave_as_it_is}
    return folder, run_ranks(ranks.everything, 2, models, folder, edits, timeout=150)


@pytest.mark.parametrize("case", ["DP2", "TP2", "PP2 bfloat16"])
def test_a_save_in_the_background_holds_the_steps_state_though_training_went_on(
    two: tuple[Path, list[dict]], case: str
) -> None:
    for found in two[1]:
        assert found[case] == {
            "written when training went on": False,
            "moved": True,
            "the step's weights": True,
            "same next step": True,
            "undamaged": True,
        }


def test_the_hugging_face_export_of_a_checkpoint_is_that_of_its_step(
    two: tuple[Path, list[dict]], models: Path
) -> None:
    exported = load_file(two[0] / "PP2 bfloat16" / "hf-export" / "model.safetensors")
    before = load_file(models / "llama" / "model.safetensors")
    assert exported.keys() == before.keys()
    assert all((exported[name].float() - tensor).abs().max() < 0.01 for name, tensor in before.items())
    assert any((exported[name].float() - tensor.bfloat16().float()).any() for name, tensor in before.items())
    assert (two[0] / "PP2 bfloat16" / "hf-export" / "config.json").is_file()


@pytest.mark.parametrize("name", ranks.RESHARDED)
def test_another_layout_or_optimizer_goes_on_with_the_whole_optimizer_state(
    two: tuple[Path, list[dict]], name: str
) -> None:
    """Without its moments Adam would move most weights by the whole learning rate."""
    assert all(found[name] < 1e-3 for found in two[1]), [found[name] for found in two[1]]


@pytest.mark.parametrize("name", ranks.FULL)
def test_a_disk_that_is_full_on_one_rank_is_told_on_all_with_the_target(
    two: tuple[Path, list[dict]], name: str
) -> None:
    folder, found = two
    for said in (each[name] for each in found):
        assert "File too large" in said and str(folder / name) in said and said.endswith("(found by rank 1)"), said
        assert ".partial" not in said and "\n" not in said
    assert not list(folder.glob(f"*{name}*"))


def test_the_list_names_every_file_with_its_size_and_checksum(two: tuple[Path, list[dict]]) -> None:
    saved = two[0] / "DP2"
    files = json.loads((saved / "files.json").read_text())["files"]
    paths = [path for path in saved.rglob("*") if path.is_file() and path.name != "files.json"]
    assert sorted(files) == sorted(str(path.relative_to(saved)) for path in paths)
    for path in paths:
        content = path.read_bytes()
        expected = {"bytes": len(content), "crc32": zlib.crc32(content)}
        assert files[str(path.relative_to(saved))] == expected, path
    for name in ("weights/__0_0.distcp", "optimizer/__0_0.distcp", "rng/rank-00001.pt", "state.json", "hf/config.json"):
        assert name in files


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_by_file_on_every_rank(two: tuple[Path, list[dict]], damage: str) -> None:
    folder, (first, second) = two
    sentence = first[damage][0]
    assert first[damage] == second[damage]
    assert DAMAGES[damage][1] in sentence and str(folder / "damaged" / damage) in sentence
    assert "\n" not in sentence


def test_a_whole_checkpoint_has_no_damage(two: tuple[Path, list[dict]]) -> None:
    assert [found["whole"] for found in two[1]] == [[None, None], [None, None]]


def test_without_checksums_sizes_are_compared_all_the_same(two: tuple[Path, list[dict]]) -> None:
    found = two[1][0]
    assert found["flipped bit"][1] is None
    assert all(found[name][1] == found[name][0] for name in ("truncated", "no generators"))


def test_a_checkpoint_of_a_newer_format_asks_for_a_newer_megarl(two: tuple[Path, list[dict]]) -> None:
    assert two[1][0]["newer format"][0].endswith("format_version 99, but this megarl reads up to 1; update megarl.")
