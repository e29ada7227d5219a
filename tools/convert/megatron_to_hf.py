"""Megatron checkpoint → Hugging Face folder, in the checkpoint's dtype.

    python tools/convert/megatron_to_hf.py --checkpoint checkpoint --out SmolLM2-135M-rl --verify
    torchrun --nproc-per-node 4 tools/convert/megatron_to_hf.py --checkpoint checkpoint --out Qwen3-8B-rl --tp 2 --pp 2

The layout is that of the ranks that convert, whatever layout saved the checkpoint. Each file is written by
one rank. A conversion that was killed goes on when the same command, in whatever layout, is given again.
"""

from __future__ import annotations

import argparse
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

from megarl.checkpoint.manifest import HF_FOLDER, WEIGHTS_FOLDER, read_manifest
from megarl.checkpoint.target import check_target

if TYPE_CHECKING:
    import torch

    from megarl.models.build import MegatronModel


def main() -> int:
    arguments = parse_arguments()
    # Before Megatron-Core and transformers are imported, so that a mistake is answered at once.
    manifest = read_manifest(arguments.checkpoint)
    hf_files = arguments.checkpoint / HF_FOLDER
    layout = layout_of(arguments, hf_files)
    check_target(arguments.out)

    from resuming import Summary, identity, say_what_is_there

    from megarl import platform
    from megarl.checkpoint.resumable import publish_resumable
    from megarl.checkpoint.weights import build_to_fill, load_weights
    from megarl.models.bridge import read_hf_config
    from megarl.models.build import Role
    from megarl.parallel.groups import build_groups
    from megarl.weights.save_hf import save_hf

    platform.init_distributed(COLLECTIVE_TIMEOUT_S)
    groups = build_groups(layout, timeout_s=COLLECTIVE_TIMEOUT_S)
    dtype = platform.parse_dtype(manifest.dtype)
    hf_config = read_hf_config(hf_files)

    def load(dtype: torch.dtype) -> MegatronModel:
        model = build_to_fill(hf_config, groups, role=Role(manifest.role), dtype=dtype)
        load_weights(model, arguments.checkpoint)
        return model

    say(f"{arguments.checkpoint} → {arguments.out}: {hf_config.model_type}, {dtype}, {layout.describe()}")
    summary = Summary("Megatron → Hugging Face")
    model = load(dtype)
    hashes = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        hashes[name] = hash_tensor(tensor)

    if arguments.verify:
        from logits import compare_logits
        from verification import compare_with_result, conclude, hash_tensor, original_hashes
    total_bytes = manifest.num_parameters * dtype.itemsize
    folders = (arguments.checkpoint, hf_files, arguments.checkpoint / WEIGHTS_FOLDER)
    files = [file for folder in folders for file in folder.iterdir() if file.is_file()]
    same = identity(arguments.checkpoint, files, **{"--max-shard-size": arguments.max_shard_size})
    with publish_resumable(arguments.out, same) as unfinished:
        say_what_is_there(unfinished.journal)
        with progress("writing", total_bytes) as report:
            written = save_hf(
                model,
                unfinished.folder,
                source_folder=hf_files,
                max_file_bytes=arguments.max_shard_size,
                journal=unfinished.journal,
                progress=report,
                on_tensor=note if arguments.verify else None,
            )
    summary.say(written)
    del model  # the check below needs the memory
    if not arguments.verify:
        return 0
    tensors = compare_with_result(hashes, arguments.out, original_hashes(arguments.checkpoint))
    logits = compare_logits(load, arguments.out, dtype) if arguments.verify == "all" else None
    ok = conclude(tensors, logits, source=arguments.checkpoint, result=arguments.out)
    return 0 if ok else EXIT_NOT_VERIFIED


def parse_arguments() -> argparse.Namespace:
    parser = Parser(prog="megatron_to_hf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="what hf_to_megatron.py wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make; must not exist")
    add_verify_argument(parser, "compare every written tensor")
    add_shard_size_argument(parser)
    add_layout_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
