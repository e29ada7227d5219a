"""A person's mistake is answered in one sentence, and leaves nothing behind."""

import json
import re
import shutil

import pytest
from safetensors.torch import save_file

from tests.launch import torchrun
from tests.tiny_models import make_hf_model
from tests.tools.converters import convert, report, sentence, tensors

FULL_DISK_BYTES = 200_000


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return make_hf_model("llama", tmp_path_factory.mktemp("models") / "sharded", max_shard_size="300KB")


@pytest.fixture
def hf(sharded, tmp_path):
    """A copy to damage."""
    return shutil.copytree(sharded, tmp_path / "hf")


def refuse(hf, *arguments):
    """The sentence, after a look at what was left behind."""
    before = sorted(hf.parent.iterdir())
    said = sentence(convert("hf_to_megatron", "--hf", hf, "--out", hf.parent / "out", *arguments))
    assert sorted(hf.parent.iterdir()) == before
    return said


def test_a_missing_shard_is_named(hf):
    last = sorted(hf.glob("*.safetensors"))[-1]
    last.unlink()
    assert f"model.safetensors.index.json names {last.name}, which is not in {hf}" in refuse(hf)


def test_a_truncated_shard_is_named(hf):
    last = sorted(hf.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:50_000])
    assert f"{last} (50000 bytes) is truncated or not safetensors" in refuse(hf)


def test_an_index_that_names_a_tensor_which_is_not_there_is_refused(hf):
    index = hf / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(content | {"weight_map": content["weight_map"] | {"model.extra": file}}))
    assert f"{index} says that {file} holds model.extra, but it does not" in refuse(hf)


def one_file(hf, changed):
    """Replaces the shards by one file of changed tensors."""
    for path in [*hf.glob("*.safetensors"), hf / "model.safetensors.index.json"]:
        path.unlink()
    save_file(changed, hf / "model.safetensors")


def test_a_weight_that_is_no_number_proves_nothing(hf):
    changed = tensors(hf)
    changed["model.norm.weight"][0] = float("nan")
    one_file(hf, changed)
    result = convert("hf_to_megatron", "--hf", hf, "--out", hf.parent / "out", "--verify")
    assert result.returncode == 3
    assert f"not verified: logits are NaN or infinite, so they prove nothing: {hf} may hold" in result.stderr
    assert report(hf.parent / "out")["logits"]["max_abs_difference"] is None


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(hf):
    content = tensors(hf)
    content["model.layers.2.mlp.down_proj.weight"] = content["model.layers.2.mlp.down_proj.weight"][:, :100].clone()
    one_file(hf, content)
    said = refuse(hf)
    assert "model.layers.2.mlp.down_proj.weight has shape [64, 100], but config.json implies [64, 128]" in said


def test_a_tensor_that_is_missing_is_named(hf):
    content = tensors(hf)
    del content["model.norm.weight"]
    one_file(hf, content)
    assert f"{hf} lacks model.norm.weight" in refuse(hf)


def test_an_unsupported_architecture_lists_the_supported_ones(hf):
    config = hf / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gpt2"}))
    said = refuse(hf)
    assert "'gpt2', which is not supported" in said
    assert all(family in said for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"))


def test_a_layout_that_does_not_divide_is_refused_with_all_reasons_and_the_flags_names(hf):
    result = convert("hf_to_megatron", "--hf", hf, "--out", hf.parent / "out", "--tp", 3, "--pp", 3, "--ep", 2)
    assert result.returncode == 2
    first, *reasons = result.stderr.splitlines()
    assert first == f"{len(reasons)} problems:"
    for reason in ("--tp is 3.*attention heads", "--pp is 3.*4 layers", "--ep is 2.*no experts", "world size 1"):
        assert re.search(f"^- .*{reason}", result.stderr, re.MULTILINE), result.stderr
    assert "parallel." not in result.stderr


def test_a_target_that_exists_is_not_overwritten(hf):
    (hf.parent / "out").mkdir()
    assert refuse(hf).startswith(f"{hf.parent / 'out'} exists, and nothing is overwritten")


def test_a_target_below_a_file_cannot_be_made(hf):
    (hf.parent / "file").touch()
    said = sentence(convert("hf_to_megatron", "--hf", hf, "--out", hf.parent / "file" / "out"))
    assert f"since {hf.parent / 'file'} is a file" in said


def test_a_disk_that_runs_full_leaves_nothing_under_the_name(hf):
    arguments = ["--hf", hf, "--out", hf.parent / "out"]
    said = sentence(convert("hf_to_megatron", *arguments, largest_file=FULL_DISK_BYTES))
    assert said == f"cannot write {hf.parent / 'out' / 'weights'}: File too large"
    assert sorted(path.name for path in hf.parent.iterdir()) == ["hf"]


def test_a_disk_that_runs_full_on_the_way_back_leaves_nothing_either(sharded, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    assert convert("hf_to_megatron", "--hf", sharded, "--out", checkpoint).returncode == 0
    arguments = ["--checkpoint", checkpoint, "--out", tmp_path / "back"]
    said = sentence(convert("megatron_to_hf", *arguments, largest_file=FULL_DISK_BYTES))
    assert said == f"cannot read or write {tmp_path / 'back'}: File too large"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_a_folder_that_is_no_checkpoint_is_refused(sharded, tmp_path):
    said = sentence(convert("megatron_to_hf", "--checkpoint", sharded, "--out", tmp_path / "back"))
    assert f"{sharded} is not a megarl checkpoint" in said


def test_under_torchrun_one_rank_says_it_and_all_end(hf):
    last = sorted(hf.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:50_000])
    arguments = ["--hf", hf, "--out", hf.parent / "out", "--pp", 2]
    result = torchrun(2, "tools/convert/hf_to_megatron.py", *arguments, timeout=60, check=False)
    assert result.returncode != 0
    assert result.stderr.count("is truncated or not safetensors") == 1
    # torchrun itself always prints a traceback of its own once a rank has left with an error.
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert not (hf.parent / "out").exists()


def test_a_config_that_contradicts_itself_is_refused_with_the_reason(tmp_path):
    hf = make_hf_model("qwen2", tmp_path / "hf")
    content = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 3}))
    said = refuse(hf)
    assert f"{hf}/config.json is refused by transformers" in said
    assert "`num_hidden_layers` (3) must be equal to the number of `layer_types` (4)" in said
