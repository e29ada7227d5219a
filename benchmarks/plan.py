"""The preflight: seconds and peak memory of a plan, without and with the weight map, for 70B and for 671B.

    python benchmarks/plan.py [--models llama-70b deepseek-v3-671b] [--json FILE]

Each row is `launch/plan.py` in a process of its own, imports included. Memory is the proportional set size of that
process and of all that it starts, added up, sampled every 50 ms: pages that processes share count once. Linux only.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SAMPLING_S = 0.05
MIB = 2**20
_ROW = "{model:>18}  map {map!s:>5}: {seconds:6.1f} s ({cpu_s:.1f} s of CPU)  {peak_mib:7.0f} MiB  {answer}"

MODELS: dict[str, dict[str, Any]] = {
    "llama-70b": {
        "gpus": 64,
        "config": {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        "settings": [
            "parallel.tensor_model_parallel_size=8",
            "parallel.pipeline_model_parallel_size=4",
            "rollout.tensor_model_parallel_size=8",
        ],
    },
    "deepseek-v3-671b": {
        "gpus": 512,
        "config": {
            "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 163840,
        },
        "settings": [
            "parallel.tensor_model_parallel_size=8",
            "parallel.pipeline_model_parallel_size=16",
            "parallel.expert_model_parallel_size=32",
            "parallel.expert_tensor_parallel_size=1",
            "parallel.num_layers_in_first_pipeline_stage=3",
            "parallel.num_layers_in_last_pipeline_stage=2",
            "rollout.tensor_model_parallel_size=32",
        ],
    },
}
COMMON = """
data: {train_files: prompts.parquet, train_batch_size: 512, max_prompt_length: 1024, max_response_length: 3072}
actor: {ppo_mini_batch_size: 512, max_tokens_per_micro_batch: 4096}
model: {path: model, recompute_granularity: full}
rollout: {engine: sglang, n: 8}
trainer: {val_before_train: false, test_freq: -1}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        for options in (["--no-map"], []):
            rows.append({"model": name, "map": not options, **measure(MODELS[name], options)})
            print(_ROW.format(**rows[-1]))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def measure(model: dict[str, Any], options: list[str]) -> dict[str, Any]:
    """One plan: seconds, peak MiB, and what it says of the weight map."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(model["config"]))
        (folder / "run.yaml").write_text(COMMON)
        command = [sys.executable, str(ROOT / "launch" / "plan.py"), "--config", str(folder / "run.yaml")]
        command += ["--gpus", str(model["gpus"]), "--json", *options, *model["settings"]]
        start, cpu_start, peak = time.perf_counter(), cpu_seconds(), 0
        with (folder / "out").open("w+") as out:
            process = subprocess.Popen(command, cwd=folder, stdout=out)
            while process.poll() is None:
                peak = max(peak, proportional_bytes(process.pid))
                time.sleep(SAMPLING_S)
            seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
            out.seek(0)
            answer = json.load(out)
    maps = answer.get("weight_map", {"models": []})["models"]
    said = "; ".join(
        f"{found['tensors']} tensors, {found['built']} ranks built in {found['seconds']:.1f} s, "
        f"{len(found['problems'])} problems"
        for found in maps
    )
    return {"seconds": seconds, "cpu_s": cpu, "peak_mib": peak / MIB, "answer": said}


def cpu_seconds() -> float:
    """Of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def proportional_bytes(pid: int) -> int:
    """Of a process and all below it; 0 for one that has just ended."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return total + sum(proportional_bytes(int(child)) for child in children)


if __name__ == "__main__":
    main()
