"""A tiny model is a whole chat model: tokenizer, template, end token, and weights that follow from the seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.config import ModelShape
from megarl.data.chat import load_chat_tokenizer
from tests.launch import ROOT


def make(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/make_tiny_model.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for name, seed in (("a", 1), ("again", 1), ("b", 2)):
        result = make("--out", folder / name, "--hidden", 32, "--layers", 2, "--seed", seed)
        assert result.returncode == 0, result.stderr
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


def test_options_that_make_no_model_are_refused_in_one_sentence(folder: Path) -> None:
    for arguments, part in (
        (["--out", folder / "c", "--hidden", 30], "multiple of 8"),
        (["--out", folder / "c", "--layers", 0], "at least one layer"),
        (["--out", folder / "a"], "exists already"),
    ):
        result = make(*arguments)
        assert result.returncode == 2 and part in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (folder / "c").exists()
