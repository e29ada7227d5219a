"""The sizes of a model, read from a Hugging Face `config.json` without transformers or torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megarl.config.errors import ConfigError

DENSE_MODEL_TYPES = ("llama", "qwen2", "qwen3")
EXPERT_BIAS_MODEL_TYPES = ("glm4_moe", "deepseek_v3")
"""Their routers add a bias to an expert's score when they choose (`e_score_correction_bias`)."""
MOE_MODEL_TYPES = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3")
SUPPORTED_MODEL_TYPES = DENSE_MODEL_TYPES + MOE_MODEL_TYPES

# The same quantity under the names that the model families (and transformers 4 and 5) give it.
_EXPERT_COUNT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")

_GROUP_KEYS = ("n_group", "topk_group")
# transformers' values of absent keys.
_GROUP_DEFAULTS = {
    "glm4_moe": {"n_group": 1, "topk_group": 1},
    "deepseek_v3": {"n_group": 8, "topk_group": 4},
}

# transformers' Qwen3Config has this as the value of an absent `head_dim`, not hidden_size ÷ num_attention_heads.
_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Widths of multi-latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    query_rank: int | None
    """Width of the queries' latent; None: queries are projected directly."""
    key_value_rank: int
    nope: int
    """Width of a head's part without rotation."""
    rope: int
    """Width of a head's part with rotation."""
    value: int
    """Width of a value head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What a layout and a batch have to agree with. All sizes are of the whole model, not of one rank's shard."""

    model_type: str
    """Hugging Face's `model_type`, one of `SUPPORTED_MODEL_TYPES`."""
    num_layers: int
    """Transformer layers; multi-token-prediction layers are not counted."""
    hidden_size: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads (Megatron's `num_query_groups`)."""
    head_dim: int
    """Width of one query head; for multi-latent attention its part with and its part without rotation together."""
    ffn_size: int
    """Inner width of a dense feed-forward layer."""
    num_dense_layers: int
    """Layers with a dense feed-forward: all of a dense model, the first few of some MoE models."""
    vocab_size: int
    """Tokens before any padding."""
    max_positions: int
    """Tokens in the longest sequence that the position embedding was made for."""
    tied: bool
    """Whether the output layer is the embedding (`tie_word_embeddings`)."""
    num_experts: int = 0
    """Routed experts of one layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Routed experts that a token passes through."""
    moe_ffn_size: int = 0
    """Inner width of one routed expert."""
    shared_ffn_size: int = 0
    """Inner width of all shared experts of one layer together."""
    latent: LatentAttention | None = None
    """None: ordinary grouped-query attention."""

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def query_width(self) -> int:
        """All query heads of a layer together."""
        return self.num_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """All key heads of a layer together; values have as much, except in multi-latent attention."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_output_width(self) -> int:
        """What attention hands to its output projection."""
        return self.num_heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def attention_matrices(self) -> int:
        """Elements of the matrices that a token is multiplied by in one layer's attention."""
        output = self.hidden_size * self.attention_output_width
        if self.latent is None:
            return self.hidden_size * (self.query_width + 2 * self.key_value_width) + output
        rank = self.latent.query_rank
        query = self.hidden_size * self.query_width if rank is None else rank * (self.hidden_size + self.query_width)
        key_value_up = self.latent.key_value_rank * self.num_heads * (self.latent.nope + self.latent.value)
        down = self.hidden_size * (self.latent.key_value_rank + self.latent.rope)
        return query + down + key_value_up + output

    @classmethod
    def from_hf(cls, path: str | Path) -> Self:
        """Read the shape from a model folder, or from its `config.json`.

        Raises:
            ConfigError: the file is missing or not JSON, lacks a field, or names a model that is not supported.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        return cls(**_shape_fields(_Source(file, _read_json(file))))


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (file.parent / "megarl.json").exists():
            raise ConfigError(
                f"{file.parent} is a checkpoint of megarl, where a Hugging Face folder is needed: convert it with "
                "tools/convert/megatron_to_hf.py."
            ) from None
        raise ConfigError(
            f"{file} does not exist: a model folder needs the config.json that Hugging Face saves with the weights."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid JSON ({error}): copy it from the model again.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a JSON {type(content).__name__}, where a model's config is an object.")
    return content


@dataclass(frozen=True)
class _Source:
    """A parsed `config.json`, and the file that errors name."""

    file: Path
    values: Mapping[str, Any]

    def integer(self, *keys: str, default: int | None = None, at_least: int = 1) -> int:
        """The first of `keys` that is present; `default` (where given) if all are absent or null."""
        present = [key for key in keys if self.values.get(key) is not None]
        if not present:
            if default is not None:
                return default
            raise ConfigError(f"{self.file} has no '{' or '.join(keys)}', which a {self.model_type} model needs.")
        value = self.values[present[0]]
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ConfigError(
                f"{self.file} has {present[0]}={value!r}, where a whole number of at least {at_least} is needed."
            )
        return value

    @property
    def model_type(self) -> str:
        model_type = self.values.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            supported = ", ".join(SUPPORTED_MODEL_TYPES)
            raise ConfigError(
                f"{self.file} has model_type={model_type!r}, which is not supported; supported: {supported}."
            )
        return model_type


def _shape_fields(source: _Source) -> dict[str, Any]:
    model_type = source.model_type
    _refuse_unmapped_variants(source)
    num_layers = source.integer("num_hidden_layers")
    hidden_size = source.integer("hidden_size")
    num_heads = source.integer("num_attention_heads")
    ffn_size = source.integer("intermediate_size")
    fields = {
        "model_type": model_type,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        # transformers fills an absent key only for llama with the number of query heads.
        "num_kv_heads": source.integer("num_key_value_heads", default=num_heads if model_type == "llama" else None),
        "head_dim": _head_dim(source, hidden_size, num_heads),
        "ffn_size": ffn_size,
        "num_dense_layers": num_layers,
        "vocab_size": source.integer("vocab_size"),
        "max_positions": source.integer("max_position_embeddings"),
        "tied": _tied(source),
    }
    if model_type in MOE_MODEL_TYPES:
        fields |= _expert_fields(source, ffn_size)
    if model_type == "deepseek_v3":
        fields["latent"] = _latent_attention(source)
    return fields


def _latent_attention(source: _Source) -> LatentAttention:
    return LatentAttention(
        query_rank=source.integer("q_lora_rank") if source.values.get("q_lora_rank") is not None else None,
        key_value_rank=source.integer("kv_lora_rank"),
        nope=source.integer("qk_nope_head_dim"),
        rope=source.integer("qk_rope_head_dim"),
        value=source.integer("v_head_dim"),
    )


def _tied(source: _Source) -> bool:
    value = source.values.get("tie_word_embeddings")
    if value not in (None, True, False):
        raise ConfigError(f"{source.file} has tie_word_embeddings={value!r}, where true or false is needed.")
    return bool(value)


def _head_dim(source: _Source, hidden_size: int, num_heads: int) -> int:
    if source.model_type == "deepseek_v3":
        return source.integer("qk_nope_head_dim") + source.integer("qk_rope_head_dim")
    if source.model_type == "qwen3":
        return source.integer("head_dim", default=_QWEN3_HEAD_DIM)
    return source.integer("head_dim", default=hidden_size // num_heads)


def _expert_fields(source: _Source, ffn_size: int) -> dict[str, int]:
    # mixtral has one feed-forward width, which is that of an expert.
    moe_ffn_size = ffn_size if source.model_type == "mixtral" else source.integer("moe_intermediate_size")
    shared_ffn_size = {
        "qwen2_moe": lambda: source.integer("shared_expert_intermediate_size", at_least=0),
        "glm4_moe": lambda: source.integer("n_shared_experts", at_least=0) * moe_ffn_size,
        "deepseek_v3": lambda: source.integer("n_shared_experts", at_least=0) * moe_ffn_size,
    }.get(source.model_type, lambda: 0)()
    experts, chosen = source.integer(*_EXPERT_COUNT_KEYS), source.integer("num_experts_per_tok")
    if chosen > experts:
        raise ConfigError(
            f"{source.file} has num_experts_per_tok={chosen}, but a layer has only {experts} experts: copy the file "
            "from the model again."
        )
    if source.model_type in EXPERT_BIAS_MODEL_TYPES:
        _check_groups(source, experts)
    return {
        "num_experts": experts,
        "experts_per_token": chosen,
        "moe_ffn_size": moe_ffn_size,
        "shared_ffn_size": shared_ffn_size,
        "num_dense_layers": _leading_dense_layers(source),
    }


def _leading_dense_layers(source: _Source) -> int:
    if source.model_type not in ("glm4_moe", "deepseek_v3"):
        return 0
    dense, layers = source.integer("first_k_dense_replace", at_least=0), source.integer("num_hidden_layers")
    if dense >= layers:
        raise ConfigError(
            f"{source.file} has first_k_dense_replace={dense}, which leaves none of {layers} layers with experts: "
            "correct it."
        )
    return dense


def _check_groups(source: _Source, experts: int) -> None:
    """Experts come in groups, of which a token's best are chosen from (arXiv:2412.19437, 2.1.2)."""
    groups, chosen = (source.integer(key, default=_GROUP_DEFAULTS[source.model_type][key]) for key in _GROUP_KEYS)
    if experts % groups or chosen > groups:
        raise ConfigError(
            f"{source.file} has {experts} experts in n_group={groups} groups, of which topk_group={chosen} are chosen: "
            "groups have to divide the experts, and no more can be chosen than there are."
        )


def _refuse_unmapped_variants(source: _Source) -> None:
    """Refuse options of a supported family that the Megatron model would silently leave out."""
    values = source.values
    # qwen's configs carry a window that `use_sliding_window: false` switches off; for the others a number is enough.
    if values.get("use_sliding_window", values.get("sliding_window") is not None):
        raise ConfigError(f"{source.file} asks for sliding-window attention, which is not supported.")
    if values.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{source.file} has hidden_act={values['hidden_act']!r}; supported is 'silu' (SwiGLU).")
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"{source.file} makes only some layers mixtures of experts (mlp_only_layers, decoder_sparse_step), "
            f"which is not supported for {source.model_type}."
        )
