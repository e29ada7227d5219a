"""gguf_to_hf.py: the model that a GGUF file was made from comes back."""

import gguf
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_models import VOCAB, make_hf_model
from tests.tools.converters import convert, sentence, succeeded, tensors

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEAD_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "h"), ("th", "e")]
TOKENS = [*SPECIAL_TOKENS, *BYTES, *("".join(pair) for pair in MERGES)]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def gguf_name(name):
    stem, suffix = name.rsplit(".", 1)
    if stem in HEAD_NAMES:
        return f"{HEAD_NAMES[stem]}.{suffix}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{suffix}"


def interleaved(weight, heads):
    """llama.cpp rotates neighbouring elements of a head, transformers its halves."""
    head = weight.shape[0] // heads
    return weight.reshape(heads, 2, head // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(hf, file):
    """What llama.cpp's converter writes for a llama model, in float32."""
    config = transformers.AutoConfig.from_pretrained(hf)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    unused = [f"<|unused{index}|>" for index in range(VOCAB - len(TOKENS))]
    writer.add_token_list([*TOKENS, *unused])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control] * 2 + [normal] * (len(TOKENS) - 2) + [control] * len(unused))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in tensors(hf).items():
        values = tensor.numpy()
        for part, count in heads.items():
            if part in name:
                values = interleaved(values, count)
        writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=["llama", "llama_tied"])
def converted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_hf_model(request.param, folder / "hf")
    write_gguf(folder / "hf", folder / "tiny.gguf")
    succeeded(convert("gguf_to_hf", "--gguf", folder / "tiny.gguf", "--out", folder / "back"))
    return folder


def test_the_weights_are_those_the_file_was_made_from(converted):
    expected, found = tensors(converted / "hf"), tensors(converted / "back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_transformers_computes_the_same_logits(converted):
    ids = torch.arange(20).unsqueeze(0)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        expected, found = (load(converted / name)(ids).logits for name in ("hf", "back"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_tokenizer_chat_template_and_generation_settings_come_along(converted):
    reference = Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, MERGES))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted / "back")
    text = "the other thé 42"
    assert tokenizer(text, add_special_tokens=False).input_ids == reference.encode(text).ids
    assert tokenizer.apply_chat_template([{"content": "the"}], tokenize=False) == "<|im_start|>the<|im_end|>"
    settings = transformers.GenerationConfig.from_pretrained(converted / "back")
    assert (settings.bos_token_id, settings.eos_token_id) == (0, 1)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 and so on")
    said = sentence(convert("gguf_to_hf", "--gguf", tmp_path / "model.gguf", "--out", tmp_path / "out"))
    assert said == f"{tmp_path / 'model.gguf'} is not a GGUF file: it starts with b'PK\\x03\\x04' instead of b'GGUF'"


@pytest.mark.parametrize("converted", ["llama"], indirect=True)
def test_a_truncated_file_is_refused_and_leaves_nothing(converted, tmp_path):
    whole = (converted / "tiny.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[: len(whole) // 2])
    said = sentence(convert("gguf_to_hf", "--gguf", tmp_path / "model.gguf", "--out", tmp_path / "out"))
    assert f"{tmp_path / 'model.gguf'} cannot be read" in said
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_package_that_is_not_installed_is_named(tmp_path):
    said = sentence(convert("gguf_to_hf", "--package", "no-such-package", "--out", tmp_path / "out"))
    assert "--package no-such-package: no such package is installed" in said
