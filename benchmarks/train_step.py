"""One training step of the same model on the same packed tokens: megarl (Megatron-Core) beside transformers + AdamW.

Both do forward, next-token loss, backward, gradient clipping and one AdamW step in one process. Steps alternate within
one run, so that a busy machine slows both; the figure is the ratio of medians.

    python benchmarks/train_step.py [--hf DIR | --family qwen3_moe] [--dtype float32] [--sequences 8] [--length 256]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from megarl import platform
from megarl.config.layout import Layout
from megarl.config.schema_learning import OptimConfig
from megarl.data.packing import IGNORED_TARGET, PackedBatch, pack_sequences
from megarl.models.bridge import read_hf_config
from megarl.models.build import build_model
from megarl.models.outputs import token_logprobs
from megarl.models.train import TrainableModel, optimizer_config
from megarl.parallel.groups import build_groups
from megarl.weights.load_hf import load_hf

LR = 1e-5


_SIZES = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, intermediate_size=1536),
    # As wide for a token as the dense one: 4 of 16 experts.
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, moe_intermediate_size=384, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True
    ),
}


def random_model(family: str, folder: Path) -> Path:
    """A model of 27 million parameters a token (qwen3_moe: 70 million in all): small enough for a laptop, large enough
    that matrices dominate.
    """
    config = FAMILIES[family]()
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def megarl_step(folder: Path, dtype: torch.dtype, sequences: list[torch.Tensor]) -> Callable[[], float]:
    groups = build_groups(Layout())
    model = build_model(read_hf_config(folder), groups, dtype=dtype)
    load_hf(model, folder)
    trainable = TrainableModel(
        model, optimizer_config(OptimConfig(lr=LR, weight_decay=0.0), dtype, use_distributed_optimizer=False)
    )
    batch = pack_sequences(sequences, groups.layout)
    count = sum(len(sequence) - 1 for sequence in sequences)

    def loss(logits: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict]:
        logprobs, _ = token_logprobs(model, logits, shard)
        value = -logprobs[shard.targets != IGNORED_TARGET].sum() / count
        return value, {"loss": value.detach()}

    return lambda: float(trainable.step([batch], loss).outputs[0]["loss"])


def transformers_step(folder: Path, dtype: torch.dtype, sequences: list[torch.Tensor]) -> Callable[[], float]:
    """Equal lengths, so that transformers' batch has no padding either; float32 weights, autocast for bfloat16."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, foreach=True)
    batch = torch.stack(sequences)
    autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32)

    def step() -> float:
        optimizer.zero_grad()
        with autocast:
            logits = model(batch, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--hf", type=Path, help="a Hugging Face folder")
    model.add_argument("--family", default="qwen3", choices=tuple(FAMILIES), help="a random model of this family")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    platform.init_distributed()
    dtype = platform.parse_dtype(arguments.dtype)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.hf or random_model(arguments.family, Path(temporary))
        vocab = read_hf_config(folder).vocab_size
        generator = torch.Generator().manual_seed(0)
        shape = (arguments.sequences, arguments.length)
        sequences = list(torch.randint(0, vocab, shape, generator=generator))
        steps = {
            "megarl": megarl_step(folder, dtype, sequences),
            "transformers": transformers_step(folder, dtype, sequences),
        }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(arguments.rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            loss = step()
            if round_number:  # the first round allocates
                seconds[name].append(time.perf_counter() - start)
            print(f"{name:12} {time.perf_counter() - start:6.3f} s  loss {loss:.5f}")
    tokens = arguments.sequences * arguments.length
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    ratio = rates["megarl"] / rates["transformers"]
    print(f"tokens/s: megarl {rates['megarl']:.0f}, transformers {rates['transformers']:.0f}; ratio {ratio:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"tokens_per_s": rates, "ratio": ratio, "seconds": seconds}))


if __name__ == "__main__":
    main()
