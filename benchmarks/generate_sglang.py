"""Generation with SGLang: tokens/s through megarl's engine beside SGLang called directly.

    python benchmarks/generate_sglang.py --hf DIR [--sequences 16 64 256] [--n 8] [--new-tokens 64] [--dtype float32]
                                         [--rounds 3] [--json]

Both answer the same prompts, of uneven length and random tokens, with `n` sampled responses of exactly `new-tokens`
tokens each at temperature 1, with log-probs. Directly means `sglang.Engine.generate` with the whole batch in one call,
in this process; megarl's engine lives in a process of its own and gives each response as it finishes. The two have the
same server arguments and alternate within one run, so that a busy machine slows both; the figure is the ratio of
medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from generate import make_prompts

from megarl import platform
from megarl.rollout.engine import Request, SamplingParams
from megarl.rollout.sglang.environment import server_environment
from megarl.rollout.sglang.options import EngineSettings, engine_arguments
from megarl.rollout.sglang.placement import place
from megarl.rollout.sglang_engine import SGLangEngine
from megarl.weights.bucket import pack
from megarl.weights.safetensors_io import SafetensorsReader

_ENVIRONMENT_IS_SET = "MEGARL_BENCHMARK_SGLANG"
_TOKENS = 512
"""Longest prompt and response together."""
_TENSORS_A_BUCKET = 16


def megarl_engine(settings: EngineSettings) -> SGLangEngine:
    engine = SGLangEngine(settings, place(0, 1, 1), None)
    reader = SafetensorsReader(settings.model_path)
    names = reader.names()
    engine.begin_weight_update(0)
    for start in range(0, len(names), _TENSORS_A_BUCKET):
        dtype = platform.parse_dtype(settings.dtype)
        engine.receive_bucket(
            pack(
                [(name, reader.read(name).to(dtype)) for name in names[start : start + _TENSORS_A_BUCKET]], mapped=True
            )
        )
    engine.end_weight_update()
    return engine


def direct_engine(settings: EngineSettings) -> Any:
    from sglang import Engine

    arguments = engine_arguments(settings, place(0, 1, 1), on_cpu=platform.current().is_cpu, address=None)
    return Engine(**{**arguments, "load_format": "auto"})


def run_megarl(engine: SGLangEngine, prompts: list[list[int]], n: int, new_tokens: int) -> int:
    sampling = SamplingParams(n=n, max_new_tokens=new_tokens, seed=0, stop_token_ids=())
    requests = [Request(request_id=i, prompt_ids=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
    return sum(len(response.token_ids) for response in engine.generate(requests))


def run_direct(engine: Any, prompts: list[list[int]], n: int, new_tokens: int) -> int:
    sampling = {"n": n, "max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
    results = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    return sum(len(result["output_ids"]) for result in results)


def measure(settings: EngineSettings, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each number of sequences: tokens/s of both, by round, and the ratio of their medians."""
    engine, direct = megarl_engine(settings), direct_engine(settings)
    vocab_size = json.loads(Path(settings.model_path, "config.json").read_text())["vocab_size"]
    for count in options.sequences:
        per_round = count // options.n
        # Other prompts in each round: SGLang would find those of an earlier one in its cache.
        prompts = make_prompts(per_round * (options.rounds + 1), vocab_size)
        sides: dict[str, Callable[[list[list[int]]], int]] = {
            "megarl": lambda part: run_megarl(engine, part, options.n, options.new_tokens),
            "direct": lambda part: run_direct(direct, part, options.n, options.new_tokens),
        }
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(options.rounds + 1):
            part = prompts[number * per_round : (number + 1) * per_round]
            for side, run in sides.items():
                start = time.perf_counter()
                tokens = run(part)
                if number:  # the first round warms up
                    speeds[side].append(tokens / (time.perf_counter() - start))
        medians = {side: statistics.median(values) for side, values in speeds.items()}
        yield {
            "sequences": count,
            "samples_per_prompt": options.n,
            "new_tokens": options.new_tokens,
            "dtype": settings.dtype,
            "tokens_per_second": medians,
            "ratio": medians["megarl"] / medians["direct"],
            "rounds": speeds,
        }
    engine.close()
    direct.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face folder of the model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256], help="responses, multiples of n")
    parser.add_argument("--n", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON record a line instead of the table")
    options = parser.parse_args()
    if any(count % options.n for count in options.sequences):
        parser.error(f"--sequences must be multiples of --n {options.n}")
    settings = EngineSettings(
        model_path=str(options.hf),
        dtype=options.dtype,
        max_tokens=_TOKENS,
        max_num_seqs=max(options.sequences),
        # Two engines share the GPU.
        gpu_memory_utilization=0.4,
        seed=0,
        options={},
    )
    if not options.json:
        print(f"{'sequences × tokens':>18}  {'dtype':8}  {'megarl':>8}  {'direct':>8}  {'ratio':>5}   (tokens/s)")
    for record in measure(settings, options):
        print(json.dumps(record) if options.json else _row(record), flush=True)


def _row(record: dict[str, Any]) -> str:
    speed = record["tokens_per_second"]
    return (
        f"{record['sequences']:>12} × {record['new_tokens']:<3}  {record['dtype']:8}  {speed['megarl']:8.0f}  "
        f"{speed['direct']:8.0f}  {record['ratio']:5.2f}"
    )


if __name__ == "__main__":
    if _ENVIRONMENT_IS_SET not in os.environ:
        # SGLang wants its environment before it is imported.
        environment = server_environment(
            os.environ, place(0, 1, 1), on_cpu=platform.current().is_cpu, cores=sorted(os.sched_getaffinity(0))
        )
        os.execve(sys.executable, [sys.executable, *sys.argv], {**environment, _ENVIRONMENT_IS_SET: "1"})
    main()
