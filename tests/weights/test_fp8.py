"""DeepSeek-V3's published form, 8-bit floats in blocks, is read as the weights it stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.errors import ConfigError
from megarl.weights.safetensors_io import SafetensorsReader
from tests.tiny_models import make_hf_model
from tests.tools.converters import convert, report, same_tensors, succeeded, tensors

BLOCK = 128
WIDE = "model.layers.1.mlp.shared_experts.gate_proj.weight"
LAYERS = 4


def is_quantized(name: str) -> bool:
    """The linear layers, as in the published model: not embeddings, norms, routers and the output layer."""
    return "_proj" in name and name.endswith(".weight")


def quantize(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit values and scales, such that the largest value of each block becomes 448."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block), -(-columns // block))
    values = torch.empty_like(weight)
    for i in range(scale.size(0)):
        for j in range(scale.size(1)):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale[i, j] = weight[part].abs().max() / 448
            values[part] = weight[part] / scale[i, j]
    return values.to(torch.float8_e4m3fn), scale


def dequantize(values: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    spread = torch.kron(scale, torch.ones(block, block))
    return values.float() * spread[: values.size(0), : values.size(1)]


def write_both(folder: Path, block: int) -> tuple[Path, Path]:
    """A folder in 8 bits, and one of the float32 weights that it stands for. Few sizes divide by the block."""
    source = make_hf_model(
        "deepseek_v3",
        folder / "source",
        hidden_size=192,
        intermediate_size=320,
        moe_intermediate_size=136,
        kv_lora_rank=160,
    )
    fp8, plain = (Path(shutil.copytree(source, folder / name)) for name in ("fp8", "plain"))
    stored, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if is_quantized(name):
            stored[name], stored[name + "_scale_inv"] = quantize(tensor, block)
            meant[name] = dequantize(stored[name], stored[name + "_scale_inv"], block)
        else:
            stored[name] = meant[name] = tensor
    save_file(meant, plain / "model.safetensors")
    # The published model has a layer of multi-token prediction after its last.
    first = f"model.layers.{LAYERS - 1}."
    drafts = {n.replace(first, f"model.layers.{LAYERS}."): t.clone() for n, t in stored.items() if n.startswith(first)}
    drafts[f"model.layers.{LAYERS}.eh_proj.weight"] = torch.zeros(192, 384)
    save_file({**stored, **drafts}, fp8 / "model.safetensors")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    edit_config(fp8, quantization_config=quantization, num_nextn_predict_layers=1)
    return fp8, plain


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_both(tmp_path_factory.mktemp("models"), BLOCK)


@pytest.fixture
def damaged(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(folders[0], tmp_path / "fp8"))


def test_every_tensor_reads_as_what_it_stands_for(folders: tuple[Path, Path]) -> None:
    fp8, plain = (SafetensorsReader(folder) for folder in folders)
    assert set(plain.names()) <= set(fp8.names())
    assert not any(name.endswith("_scale_inv") for name in fp8.names())
    for name in plain.names():
        assert torch.equal(fp8.read(name), plain.read(name)), name
        assert fp8.info(name) == plain.info(name)


@pytest.mark.parametrize("rows", [(0, 136), (100, 136), (127, 129), (130, 131)])
@pytest.mark.parametrize("columns", [(0, 192), (1, 128), (128, 192), (60, 190)])
def test_a_box_of_a_tensor_reads_as_that_box(
    folders: tuple[Path, Path], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    fp8, plain = (SafetensorsReader(folder) for folder in folders)
    assert plain.info(WIDE).shape == (136, 192)
    assert torch.equal(fp8.read(WIDE, (rows, columns)), plain.read(WIDE, (rows, columns)))


def test_blocks_of_another_size_are_read_as_config_json_says(tmp_path: Path) -> None:
    fp8, plain = (SafetensorsReader(folder) for folder in write_both(tmp_path, 64))
    assert torch.equal(fp8.read(WIDE), plain.read(WIDE))


def test_such_weights_are_taken_for_bfloat16_ones(folders: tuple[Path, Path]) -> None:
    assert SafetensorsReader(folders[0]).main_dtype() is torch.bfloat16


def test_the_converter_takes_it_and_gives_back_the_weights_that_it_stands_for(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    fp8, plain = folders
    succeeded(convert("hf_to_megatron", "--hf", fp8, "--out", tmp_path / "megatron", "--dtype", "float32", "--verify"))
    verified = report(tmp_path / "megatron")
    assert verified["ok"] and verified["logits"]["max_abs_difference"] < 1e-4
    assert all(name.startswith(f"model.layers.{LAYERS}.") for name in verified["left_out"])
    succeeded(convert("megatron_to_hf", "--checkpoint", tmp_path / "megatron", "--out", tmp_path / "hf"))
    assert same_tensors(tmp_path / "hf", plain)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    assert "quantization_config" not in config


def test_8_bit_floats_without_their_scales_are_refused(damaged: Path) -> None:
    content = tensors(damaged)
    del content[WIDE + "_scale_inv"]
    save_file(content, damaged / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"tensor {WIDE} is in 8-bit floats, but there is no {WIDE}_scale_inv"):
        SafetensorsReader(damaged)


def test_scales_of_other_blocks_are_refused(damaged: Path) -> None:
    edit_config(damaged, quantization_config={"weight_block_size": [64, 64]})
    with pytest.raises(
        ConfigError, match=r"_scale_inv has shape .* blocks of 64 × 64; weights and config.json are not"
    ):
        SafetensorsReader(damaged)


def test_a_block_size_that_is_none_is_refused(damaged: Path) -> None:
    edit_config(damaged, quantization_config={"weight_block_size": 128})
    with pytest.raises(ConfigError, match=r"config\.json has weight_block_size 128; .* two numbers above 0"):
        SafetensorsReader(damaged)
