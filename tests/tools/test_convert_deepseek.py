"""DeepSeek-V3, scaled down, goes there and back in PP2 × EP2."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.deepseek_v3 import make_deepseek_v3
from tests.launch import torchrun
from tests.tools.converters import convert, report, same_tensors, sentence, tensors

LAYERS, EXPERTS = 9, 16
LAYOUT = ("--pp", 2, "--ep", 2, "--first-stage-layers", 5, "--last-stage-layers", 4)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek") / "hf"
    return make_deepseek_v3(folder, layers=LAYERS, experts=EXPERTS)


def test_it_goes_there_and_back_verified_each_rank_writing_its_share(hf, tmp_path):
    size = ("--max-shard-size", "50KB")
    arguments = ["--hf", hf, "--out", tmp_path / "checkpoint", "--verify", "tensors", *LAYOUT, *size]
    there = torchrun(4, "tools/convert/hf_to_megatron.py", *arguments).stdout
    arguments = ["--checkpoint", tmp_path / "checkpoint", "--out", tmp_path / "back", "--verify", *LAYOUT, *size]
    back = torchrun(4, "tools/convert/megatron_to_hf.py", *arguments).stdout
    for folder in ("checkpoint", "back"):
        assert report(tmp_path / folder)["ok"]
        assert report(tmp_path / folder)["totals"]["equal"] == len(tensors(hf))
    assert report(tmp_path / "checkpoint")["logits"] is None
    assert same_tensors(hf, tmp_path / "back")
    writers = {path.name.split("_")[2] for path in (tmp_path / "checkpoint" / "weights").glob("*.distcp")}
    assert writers == {"0", "1", "2", "3"}
    for said in (there, back):
        assert "MB/s; by each rank" in said and "peak memory" in said


def test_missing_experts_are_named(hf, tmp_path):
    index = hf / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = "model.layers.5.mlp.experts.11.up_proj.weight"
    damaged = tmp_path / "hf"
    damaged.mkdir()
    for path in hf.iterdir():
        (damaged / path.name).symlink_to(path)
    file = content["weight_map"].pop(name)
    (damaged / index.name).unlink()
    (damaged / index.name).write_text(json.dumps(content))
    left = load_file(hf / file)
    del left[name]
    (damaged / file).unlink()
    save_file(left, damaged / file)
    said = sentence(convert("hf_to_megatron", "--hf", damaged, "--out", tmp_path / "out"))
    assert said == f"{damaged} lacks {name}, which config.json implies; copy the model again"
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()
