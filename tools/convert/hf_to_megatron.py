"""Hugging Face folder → Megatron checkpoint that loads in any layout.

    python tools/convert/hf_to_megatron.py --hf SmolLM2-135M --out checkpoint --verify
    torchrun --nproc-per-node 4 tools/convert/hf_to_megatron.py --hf Qwen3-8B --out checkpoint --tp 2 --pp 2

The layout is that of the ranks that convert, no more: use more ranks where one has not the memory for the model.
A conversion that was killed goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common import (
    COLLECTIVE_TIMEOUT_S,
    EXIT_NOT_VERIFIED,
    Parser,
    add_layout_arguments,
    add_shard_size_argument,
    add_verify_argument,
    layout_of,
    progress,
    run,
    say,
)

from megarl.checkpoint.target import check_target

if TYPE_CHECKING:
    import torch

    from megarl.models.build import MegatronModel


def main() -> int:
    arguments = parse_arguments()
    # Before Megatron-Core and transformers are imported, so that a mistake is answered at once.
    layout = layout_of(arguments, arguments.hf)
    check_target(arguments.out)
    dtype = weights_dtype(arguments.hf, arguments.dtype)

    from resuming import Summary, identity, say_what_is_there

    from megarl import platform
    from megarl.checkpoint.in_process_save import WriteOptions
    from megarl.checkpoint.resumable import publish_resumable
    from megarl.checkpoint.weights import build_to_fill, load_weights, write_weights
    from megarl.models.bridge import read_hf_config
    from megarl.models.build import Role
    from megarl.parallel.groups import build_groups
    from megarl.weights.load_hf import HfSource

    platform.init_distributed(COLLECTIVE_TIMEOUT_S)
    groups = build_groups(layout, timeout_s=COLLECTIVE_TIMEOUT_S)
    hf_config = read_hf_config(arguments.hf)

    def build(dtype: torch.dtype) -> MegatronModel:
        return build_to_fill(hf_config, groups, role=Role(arguments.role), dtype=dtype)

    say(f"{arguments.hf} → {arguments.out}: {hf_config.model_type}, {dtype}, {layout.describe()}")
    summary = Summary("Hugging Face → Megatron")
    model = build(dtype)
    source = HfSource(model, arguments.hf)
    same = identity(
        arguments.hf,
        (file for file in arguments.hf.iterdir() if file.is_file()),
        dtype=str(dtype),
        role=arguments.role,
        **{"--max-shard-size": arguments.max_shard_size},
        **{f"layout {key}": size for key, size in dataclasses.asdict(layout).items()},
    )
    with publish_resumable(arguments.out, same) as unfinished:
        say_what_is_there(unfinished.journal)
        with progress("converting", local_bytes(model)) as report:
            # Each parameter is read just before it is written, and not at all if its file is there already.
            options = WriteOptions(
                max_file_bytes=arguments.max_shard_size,
                journal=unfinished.journal,
                fill=source.fill_before_use,
                progress=report,
            )
            written = write_weights(model, unfinished.folder, arguments.hf, options)
    summary.say(written)
    del model, source  # the check below needs the memory

    def reload(dtype: torch.dtype) -> MegatronModel:
        model = build(dtype)
        load_weights(model, arguments.out)
        return model

    return verify(arguments, dtype, reload) if arguments.verify else 0


def parse_arguments() -> argparse.Namespace:
    parser = Parser(prog="hf_to_megatron.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="folder with config.json and safetensors")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the checkpoint; must not exist")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the checkpoint (default: the source's)")
    parser.add_argument(
        "--role",
        choices=["causal_lm", "critic", "reward"],
        default="causal_lm",
        help="critic and reward have a scalar head; one that the source lacks is drawn at random (default: causal_lm)",
    )
    add_verify_argument(parser, "load it again, compare every tensor")
    add_shard_size_argument(parser)
    add_layout_arguments(parser)
    return parser.parse_args()


def weights_dtype(hf: Path, wanted: str | None) -> torch.dtype:
    """The dtype of the checkpoint: what is wanted, or what most of the source's weights have.

    Raises:
        ConfigError: the source cannot be read, or has a dtype that megarl does not train in.
    """
    from megarl.config.errors import ConfigError
    from megarl.platform.dtypes import parse_dtype
    from megarl.weights.safetensors_io import SafetensorsReader

    found = SafetensorsReader(hf).main_dtype()
    name = str(found).removeprefix("torch.")
    try:
        return parse_dtype(wanted or name)
    except ValueError:
        raise ConfigError(
            f"{hf} has {name} weights, which megarl does not train in; give --dtype bfloat16 or --dtype float32"
        ) from None


def local_bytes(model: MegatronModel) -> int:
    """Bytes of this rank's parameters."""
    return sum(parameter.nbytes for chunk in model.chunks for parameter in chunk.parameters())


def verify(arguments: argparse.Namespace, dtype: torch.dtype, reload: Callable[[torch.dtype], MegatronModel]) -> int:
    """Compares the written checkpoint with its source; see `verification` and `logits`."""
    from logits import compare_logits
    from verification import compare_with_source, conclude

    model = reload(dtype)
    report = compare_with_source(model, arguments.hf)
    del model
    logits = compare_logits(reload, arguments.hf, dtype) if arguments.verify == "all" else None
    ok = conclude(report, logits, source=arguments.hf, result=arguments.out)
    return 0 if ok else EXIT_NOT_VERIFIED


if __name__ == "__main__":
    run(main)
