"""A tiny model is a whole chat model: tokenizer, template, end token, and weights that follow from the seed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megarl.config import ConfigError, ModelShape
from megarl.data.chat import load_chat_tokenizer
from tests.launch import LIMIT_S, ROOT


def tool() -> ModuleType:
    """The tool as a module: a process for each model would spend seconds on imports."""
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "tools" / "make_tiny_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(*arguments: object) -> None:
    with mock.patch.object(sys, "argv", ["make_tiny_model.py", *map(str, arguments)]):
        tool().main()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for name, seed in (("a", 1), ("again", 1), ("b", 2)):
        make("--out", folder / name, "--hidden", 32, "--layers", 2, "--seed", seed)
    return folder


def test_every_character_is_one_token_and_comes_back(folder: Path) -> None:
    chat = load_chat_tokenizer(folder / "a")
    text = "Sort 3142, please.\n~"
    rendered = chat.render([{"role": "user", "content": text}], generation_prompt=True)
    (ids,) = chat.encode([rendered])
    assert rendered == f"<|user|>{text}<|end|><|assistant|>"
    assert len(ids) == len(text) + 3
    assert chat.decode(ids[1:-2]) == text
    assert chat.end_token_ids == (ids[-2],)


def test_the_model_has_the_size_that_was_asked_for(folder: Path) -> None:
    shape = ModelShape.from_hf(folder / "a")
    assert (shape.hidden_size, shape.num_layers, shape.tied) == (32, 2, True)
    assert shape.vocab_size == len(load_chat_tokenizer(folder / "a").tokenizer)


def test_weights_follow_from_the_seed(folder: Path) -> None:
    a, again, b = (load_file(folder / name / "model.safetensors") for name in ("a", "again", "b"))
    assert all(torch.equal(a[name], again[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], b["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["--hidden", 30], "multiple of 8"), (["--layers", 0], "at least one layer"), (["--out", "."], "exists already")],
)
def test_options_that_make_no_model_are_refused(tmp_path: Path, arguments: list[object], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        make("--out", tmp_path / "c", *arguments)
    assert not (tmp_path / "c").exists()


def test_a_refusal_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, ROOT / "tools" / "make_tiny_model.py", "--out", tmp_path / "file" / "model"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 2
    assert "cannot be written" in result.stderr and result.stderr.count("\n") == 1
