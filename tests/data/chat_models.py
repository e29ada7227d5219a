"""Folders of chat models without weights: a tokenizer trained on the spot, a chat template, and a config.json."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Llama 2: a BOS before each question, the end token after each answer, no head of an assistant's turn.
INST = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
INST_WITHOUT_BOS = INST.replace("bos_token + ", "")

_CORPUS = [
    "two line breaks\n\n\nare one token\n\n\nmore often than not",
    "What is two plus three? The answer is five. Let us think step by step.",
    "user assistant system tool Hello, how are you? I am well, thank you.",
    "naïve café 😀 — 你好",
]
_SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def make_chat_model(
    folder: Path,
    *,
    template: str | None = CHATML,
    bos: str | None = None,
    eos: str | None = "<|im_end|>",
    adds_bos: bool = False,
    generation_config: dict | None = None,
    vocab_size: int | None = None,
) -> Path:
    """Writes a model folder.

    Args:
        adds_bos: whether the tokenizer puts `bos` before a text of its own accord.
        vocab_size: what config.json says; by default as many as the tokenizer has.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    write_config(folder, vocab_size or len(tokenizer))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    return folder


def write_config(folder: Path, vocab_size: int, model_type: str = "llama") -> None:
    """A config.json of a small model."""
    config = {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
