"""A new model of under a million parameters, for runs that train from scratch in minutes:

    python tools/make_tiny_model.py --out models/tiny --hidden 128 --layers 4

Writes a Hugging Face folder: a Qwen3 model with random weights, and a tokenizer that has one token for each printable
ASCII character and for the line break. The chat template writes a turn as its role's token, its text and the end token:
`<|user|>3142<|end|><|assistant|>1234<|end|>`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import string
import sys
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from megarl.config.errors import ConfigError

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = tuple(f"<|{role}|>" for role in ("system", "user", "assistant"))
CHARACTERS = tuple(sorted(string.digits + string.ascii_letters + string.punctuation + " \n"))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

HEADS, KEY_VALUE_HEADS = 4, 2
MAX_POSITIONS = 256
_BAD_INPUT = 2


def main() -> None:
    options = parse_options()
    if options.hidden < 1 or options.hidden % (2 * HEADS) or options.layers < 1:
        raise ConfigError(
            f"--hidden {options.hidden} --layers {options.layers}: the width is a multiple of {2 * HEADS} (for {HEADS} "
            "heads, each of an even width, as rotary positions need), and there is at least one layer."
        )
    if options.out.exists():
        raise ConfigError(f"--out {options.out} exists already; name another folder, or remove it.")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden=options.hidden, layers=options.layers, seed=options.seed)
    save(model, tokenizer, options.out)
    print(f"wrote {sum(parameter.numel() for parameter in model.parameters()):,} parameters to {options.out}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a tiny Hugging Face model with random weights.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--hidden", type=int, default=128, metavar="N", help="width of the model (default: 128)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="transformer layers (default: 4)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the weights (default: 0)")
    return parser.parse_args()


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character; anything but printable ASCII is the unknown token."""
    # The pad token comes first, so that it has id 0.
    names = (PAD, END, UNKNOWN, *ROLES, *CHARACTERS)
    core = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        # Text is given back as it was generated: no space before a full stop is taken away.
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(
    tokenizer: transformers.PreTrainedTokenizerFast, *, hidden: int, layers: int, seed: int
) -> transformers.Qwen3ForCausalLM:
    """A Qwen3 model with transformers' random weights, float32, embedding and output layer tied."""
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=hidden // HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(config)


def save(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the folder with config, weights, tokenizer and generation config, under its name once it is whole."""
    part = folder.with_name(f".{folder.name}.part{os.getpid()}")
    transformers.utils.logging.disable_progress_bar()
    try:
        part.mkdir(parents=True)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(folder)
    except (OSError, SafetensorError) as error:  # the second is what the library makes of a full disk
        raise ConfigError(f"{folder} cannot be written ({error}); choose another place.") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(_BAD_INPUT)
