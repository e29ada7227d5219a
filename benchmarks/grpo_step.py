"""Whole GRPO steps beside TRL's GRPOTrainer: the same model, prompts and number of generated tokens, interleaved.

After each of TRL's steps one of megarl's runs in the same process, so that a busy machine slows both. Both generate
`n` responses of exactly `--tokens` tokens to each prompt (the end token is forbidden to both), score them by the same
function, and make one AdamW step on them. The figure is the ratio of medians of generated tokens a second.

    pip install trl                                   # not one of megarl's dependencies
    python benchmarks/grpo_step.py                    # a random model: 4 layers, hidden size 128
    python benchmarks/grpo_step.py --hf models/SmolLM2-135M-Instruct --dtype bfloat16 --rounds 4
    torchrun --nproc-per-node 2 benchmarks/grpo_step.py                # both sides on two data-parallel ranks
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import transformers

from megarl import platform
from megarl.config import RunConfig, load_config
from megarl.parallel.groups import build_groups
from megarl.trainers.rl import RLTrainer
from megarl.trainers.rl_parts import build_rl_parts

PROMPTS, SAMPLES = 8, 8
LR = 1e-6

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 17 / 16.0
"""


def random_model(folder: Path) -> Path:
    """A qwen2 of 4 layers with a tokenizer of bytes and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: i for i, token in enumerate(["<|im_end|>", "<|im_start|>", *sorted(alphabet)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    config = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(folder: Path, questions: list[str]) -> None:
    """Writes `prompts.parquet`, a reward function `reward.py`, and an empty config `run.yaml`."""
    rows = [
        {"data_source": "x", "prompt": [{"role": "user", "content": q}], "reward_model": {"ground_truth": ""}}
        for q in questions
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.yaml").write_text("{}")


class MegarlSteps:
    """megarl's side."""

    def __init__(self, model: Path, folder: Path, questions: list[str], dtype: str, tokens: int, ranks: int) -> None:
        if dist.get_rank() == 0:
            write_prompts(folder, questions)
        dist.barrier()
        overrides = {
            "model.path": model,
            "model.dtype": dtype,
            "data.train_files": folder / "prompts.parquet",
            "data.train_batch_size": PROMPTS,
            "data.max_response_length": tokens,
            "actor.ppo_mini_batch_size": PROMPTS,
            "actor.max_tokens_per_micro_batch": 4096,
            "rollout.n": SAMPLES,
            "reward.custom.path": folder / "reward.py",
            "optim.lr": LR,
            "trainer.default_local_dir": folder,
            "trainer.total_epochs": 1000,
        }
        config: RunConfig = load_config(str(folder / "run.yaml"), [f"{k}={v}" for k, v in overrides.items()])
        groups = build_groups(config.parallel.layout(ranks), seed=1)
        self.parts = build_rl_parts(config, groups)
        # No end token, so that every response has the full length, as TRL's have.
        self.parts.generator._chat = _without_end(self.parts.chat)
        self.trainer = RLTrainer(self.parts)
        self.trainer.sync()
        self.step_number = 0

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.step_number += 1
        prompts = self.parts.train_data.prompts(self.parts.sampler.next_batch())
        metrics = self.trainer.train_step(self.step_number, prompts)
        assert metrics["response_length/min"] == metrics["response_length/max"]
        return time.perf_counter() - start


def _without_end(chat: Any) -> Any:
    import dataclasses

    return dataclasses.replace(chat, end_token_ids=())


def run_trl(
    model: Path, folder: Path, questions: list[str], dtype: str, tokens: int, rounds: int, mine: MegarlSteps
) -> dict[str, list[float]]:
    """Trains with TRL; after each of its steps one of megarl's. Seconds by side."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    seconds: dict[str, list[float]] = {"trl": [], "megarl": []}

    class Alternate(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds["trl"].append(time.perf_counter() - self.started)
            seconds["megarl"].append(mine.step())
            say(f"trl {seconds['trl'][-1]:.3f} s   megarl {seconds['megarl'][-1]:.3f} s")

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
        return [sum(map(ord, text)) % 17 / 16.0 for text in texts]

    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=dtype == "bfloat16",
        learning_rate=LR,
        per_device_train_batch_size=PROMPTS * SAMPLES // dist.get_world_size(),
        num_generations=SAMPLES,
        max_completion_length=tokens,
        max_steps=rounds,
        temperature=1.0,
        beta=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        generation_kwargs={"min_new_tokens": tokens, "max_new_tokens": tokens},
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in questions]),
        callbacks=[Alternate()],
    )
    trainer.train()
    return seconds


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def shared_by_all(text: str) -> str:
    """Rank 0's text, on every rank."""
    texts = [text]
    dist.broadcast_object_list(texts)
    return texts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf", type=Path, help="a Hugging Face chat model; a small random qwen2 if not given")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=32, help="of each response")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    rank, ranks = platform.init_distributed()
    questions = [f"What is {i} plus {7 * i}? Answer with a number." for i in range(64)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shared_by_all(temporary))
        model = arguments.hf or folder / "model"
        if rank == 0 and not arguments.hf:
            random_model(model)
        mine = MegarlSteps(model, folder, questions, arguments.dtype, arguments.tokens, ranks)
        try:
            seconds = run_trl(model, folder, questions, arguments.dtype, arguments.tokens, arguments.rounds, mine)
        finally:
            mine.parts.close()
        dist.barrier()
    generated = PROMPTS * SAMPLES * arguments.tokens
    rates = {name: generated / statistics.median(times[1:]) for name, times in seconds.items()}
    ratio = rates["megarl"] / rates["trl"]
    say(
        f"generated tokens/s of whole steps on {ranks} rank(s): megarl {rates['megarl']:.0f}, trl {rates['trl']:.0f}; "
        f"ratio {ratio:.2f}"
    )
    if arguments.json and rank == 0:
        arguments.json.write_text(json.dumps({"tokens_per_s": rates, "ratio": ratio, "seconds": seconds}))


if __name__ == "__main__":
    main()
