"""hf_to_megatron.py and megatron_to_hf.py, there and back."""

import hashlib
import json

import pytest
import torch
import transformers

from tests.launch import torchrun
from tests.spawn import run_ranks
from tests.tiny_models import make_hf_model
from tests.tools import verify_ranks
from tests.tools.converters import convert, report, same_tensors, succeeded, tensors

HF_TO_MEGATRON = "tools/convert/hf_to_megatron.py"


def verified(folder, num_tensors):
    """Whether verify.json says that this many tensors are equal and the logits within the limit."""
    found = report(folder)
    totals = {"tensors": num_tensors, "equal": num_tensors, "different": 0, "left_out": 0, "added": 0}
    limit = found["logits"]["limit"]
    return found["ok"] and found["totals"] == totals and found["logits"]["max_abs_difference"] <= limit == 1e-4


def test_a_sharded_model_goes_there_and_back_bit_for_bit(tmp_path):
    hf = make_hf_model("qwen2", tmp_path / "hf", max_shard_size="300KB", dtype=torch.bfloat16)
    assert len(list(hf.glob("*.safetensors"))) > 1
    succeeded(convert("hf_to_megatron", "--hf", hf, "--out", tmp_path / "checkpoint", "--verify"))
    succeeded(
        convert("megatron_to_hf", "--checkpoint", tmp_path / "checkpoint", "--out", tmp_path / "back", "--verify")
    )
    assert same_tensors(hf, tmp_path / "back")
    assert verified(tmp_path / "checkpoint", len(tensors(hf))) and verified(tmp_path / "back", len(tensors(hf)))
    assert json.loads((hf / "config.json").read_text()) == json.loads((tmp_path / "back" / "config.json").read_text())
    for entry in report(tmp_path / "back")["tensors"]:
        data = tensors(hf)[entry["name"]].view(torch.uint8).numpy().tobytes()
        assert entry["original_sha256"] == entry["sha256"] == hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """An MoE model that torchrun converted in TP2 × PP2."""
    folder = tmp_path_factory.mktemp("moe")
    make_hf_model("qwen3_moe", folder / "hf")
    arguments = ["--hf", folder / "hf", "--out", folder / "checkpoint", "--verify", "--tp", 2, "--pp", 2]
    torchrun(4, HF_TO_MEGATRON, *arguments)
    return folder


def test_torchrun_converts_an_moe_model_in_tp2_pp2_and_verifies_it(moe):
    assert verified(moe / "checkpoint", len(tensors(moe / "hf")))


def test_one_process_turns_it_back_bit_for_bit(moe, tmp_path):
    succeeded(convert("megatron_to_hf", "--checkpoint", moe / "checkpoint", "--out", tmp_path / "back"))
    assert same_tensors(moe / "hf", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back"]


def test_another_layout_turns_it_back_bit_for_bit(moe, tmp_path):
    arguments = ["--checkpoint", moe / "checkpoint", "--out", tmp_path / "back", "--ep", 2]
    torchrun(2, "tools/convert/megatron_to_hf.py", *arguments)
    assert same_tensors(moe / "hf", tmp_path / "back")


def test_a_critic_in_another_dtype_says_what_was_cast_added_and_left_out(tmp_path):
    hf = make_hf_model("llama", tmp_path / "hf")
    arguments = ["--hf", hf, "--out", tmp_path / "checkpoint", "--role", "critic", "--dtype", "bfloat16"]
    succeeded(convert("hf_to_megatron", *arguments, "--verify"))
    found = report(tmp_path / "checkpoint")
    assert found["ok"] and found["casts"] == ["float32 → bfloat16"]
    assert found["added"] == ["score.bias", "score.weight"]
    assert found["left_out"] == ["lm_head.weight"]
    succeeded(convert("megatron_to_hf", "--checkpoint", tmp_path / "checkpoint", "--out", tmp_path / "back"))
    _, loading = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(loading.values())


def test_verification_notices_a_checkpoint_that_is_not_what_was_converted(moe, tmp_path):
    content = report(moe / "checkpoint")
    content["tensors"][5]["sha256"] = "0" * 64
    (moe / "checkpoint" / "verify.json").write_text(json.dumps(content))
    arguments = ["--checkpoint", moe / "checkpoint", "--out", tmp_path / "back", "--verify"]
    result = convert("megatron_to_hf", *arguments)
    assert result.returncode == 3
    name = content["tensors"][5]["name"]
    assert result.stderr == (
        f"not verified: {name} of {tmp_path / 'back'} differ from their source; do not use it, see "
        f"{tmp_path / 'back' / 'verify.json'}\n"
    )
    assert report(tmp_path / "back")["totals"]["different"] == 1


def test_verification_notices_one_wrong_element_in_tensors_and_logits(tmp_path):
    hf = make_hf_model("llama_tied", tmp_path / "hf")
    ((right, wrong),) = run_ranks(verify_ranks.verify_with_wrong_weights, 1, hf, [0.0, 0.01])
    assert right[0] == [] and right[1] < 1
    assert wrong[0] == ["model.norm.weight"] and wrong[1] > 1
