"""Program: scalar-head models from Hugging Face folders and back, in one layout of this world.

Usage: torchrun … scalar_heads.py MODELS_FOLDER OUTPUT_FOLDER CASES_JSON LAYOUT_JSON

Each case `name: [role, source]` is loaded from MODELS_FOLDER/source, exported to OUTPUT_FOLDER/name, and read from
there by megarl and by transformers. What was found goes to OUTPUT_FOLDER/results.json.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from megarl import platform
from megarl.config.errors import ConfigError
from megarl.config.layout import Layout
from megarl.data.packing import pack_sequences
from megarl.models.bridge import read_hf_config
from megarl.models.build import MegatronModel, Role, build_model
from megarl.parallel.groups import Groups, build_groups
from megarl.weights.load_hf import load_hf
from megarl.weights.save_hf import save_hf
from tests.distributed.parity import AUTO_CLASS, whole_output
from tests.launch import LIMIT_S, end_at_the_time_limit

LENGTHS = (7, 24, 2, 19)
PADDING = 0


def sequences(vocab_size: int) -> list[torch.Tensor]:
    """None has the padding token, which is the first."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, vocab_size, (length,), generator=generator) for length in LENGTHS]


def load(folder: Path, groups: Groups, role: Role) -> MegatronModel:
    model = build_model(read_hf_config(folder), groups, role=role, dtype=torch.float32)
    for chunk in model.chunks:  # what is not set shows
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    load_hf(model, folder, head_seed=5)
    return model


def values(model: MegatronModel) -> list[torch.Tensor] | None:
    """[length] of each sequence, on the last stage."""
    batch = pack_sequences(sequences(model.vocab_size), model.groups.layout)
    output = whole_output(model, batch)
    return None if output is None else [part.squeeze(1) for part in batch.unpack(output)]


def distance_to_transformers(found: list[torch.Tensor], folder: Path, role: Role) -> float:
    """The largest difference of a value, or of a score of a batch that is padded to one length."""
    model = AUTO_CLASS[role].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows = sequences(model.config.vocab_size)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    with torch.no_grad():
        expected = model(padded, attention_mask=(padded != PADDING).long()).logits
    if role is Role.REWARD:
        return (torch.stack([row[-1] for row in found]) - expected[:, 0]).abs().max().item()
    return max((row - expected[i, : len(row), 0]).abs().max().item() for i, row in enumerate(found))


def run_case(source: Path, target: Path, role: Role, groups: Groups) -> dict:
    try:
        model = load(source, groups, role)
    except ConfigError as error:
        return {"problem": str(error)}
    before = values(model)
    if dist.get_rank() == 0:
        target.mkdir()
    dist.barrier()
    save_hf(model, target, source_folder=source)
    dist.barrier()
    after = values(load(target, groups, role))
    if before is None or after is None:
        return {}
    return {
        "values": [row.tolist() for row in before],
        "read again": max((a - b).abs().max().item() for a, b in zip(before, after, strict=True)),
        "read by transformers": distance_to_transformers(before, target, role),
    }


def main() -> None:
    end_at_the_time_limit()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    models, output = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world_size = platform.init_distributed(LIMIT_S)
    groups = build_groups(Layout(world_size=world_size, **json.loads(sys.argv[4])))
    results = {
        name: run_case(models / source, output / name, Role(role), groups)
        for name, (role, source) in json.loads(sys.argv[3]).items()
    }
    if rank == world_size - 1:  # on the last stage
        (output / "results.json").write_text(json.dumps(results))
    platform.shutdown_distributed()


if __name__ == "__main__":
    main()
