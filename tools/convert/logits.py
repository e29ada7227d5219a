"""Logits (or values) of a Megatron model beside transformers', in float32 on the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from common import is_first_rank, say

from megarl.config.errors import ConfigError
from megarl.data.packing import PackedBatch, pack_sequences
from megarl.models.build import MegatronModel, Role
from megarl.models.pipeline import run_pipeline
from megarl.parallel.context import zigzag_positions
from megarl.weights.export_hf import export_hf, plan_export
from megarl.weights.safetensors_io import SafetensorsReader
from megarl.weights.together import SharedOutcome

LIMIT = 1e-4
"""In float32 the two differ by rounding alone, mostly by 1e-6 to 1e-5. Where transformers' own two ways to compute
attention differ by more (logits near 40 do that in SmolLM2-135M), that difference is the limit."""

_TEXT = """\
The lighthouse keeper wrote 3,472 letters in 19 years, and posted none. "Why keep them?" asked the girl who brought \
the oil. He pointed at the sea: f(x) = a·sin(ωx + φ), he said, is all it ever answers.

    def tide(hours: float) -> float:
        return 1.8 * math.sin(2 * math.pi * hours / 12.42)

Später, als der Nebel kam, zählte sie die Wellen: 一, 二, 三 … until the ninth, which did not come back.
"""
"""Prose, numbers, code and several scripts: tokens from all over a vocabulary."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_RANDOM_TOKENS = 128
_SEED = 0


def compare_logits(reload: Callable[[torch.dtype], MegatronModel], hf: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Runs both models. Collective over the world; what is found is returned on rank 0.

    Args:
        reload: builds the model in a dtype and fills it from the checkpoint.
        hf: the folder for transformers.
        dtype: of the checkpoint. Both run in float32, on weights that were rounded to it.

    Raises:
        ConfigError: on every rank; transformers cannot read the tokenizer or the model.
    """
    transformers.utils.logging.disable_progress_bar()
    # Its report of tensors that the head leaves unused is no news; wrong ones show in the logits.
    transformers.utils.logging.set_verbosity_error()
    say("logits: comparing in float32; rank 0 needs memory for the whole model in transformers")
    model = reload(torch.float32)
    tokens, is_text = _tokens(hf, model)
    found = _megatron_output(model, tokens)
    head = _scalar_head(model, hf)
    role = model.role
    del model
    outcome = SharedOutcome()
    distance, limit = float("nan"), LIMIT
    with outcome.attempt(hf):
        if is_first_rank():
            reference = _Transformers(hf, dtype, head if role is not Role.CAUSAL_LM else None)
            expected = reference.output(tokens)
            assert found is not None
            distance = _distance(found[:, : expected.size(1)], expected)
            limit = max(LIMIT, _distance(reference.output(tokens, attention="eager"), expected))
    outcome.check()
    return {
        "tokens": tokens.numel(),
        "token_source": "a fixed text" if is_text else f"random ids, seed {_SEED}, since there is no tokenizer",
        "compute_dtype": "float32",
        "max_abs_difference": distance,
        "limit": limit,
    }


def _tokens(hf: Path, model: MegatronModel) -> tuple[torch.Tensor, bool]:
    """int64 [tokens], and whether they are text. Collective over the world."""
    longest = model.hf_config.max_position_embeddings
    if not any((hf / name).exists() for name in _TOKENIZER_FILES):
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(model.vocab_size, (min(_RANDOM_TOKENS, longest),), generator=generator), False
    outcome = SharedOutcome()
    ids: list[int] = []
    with outcome.attempt(hf):
        try:
            ids = transformers.AutoTokenizer.from_pretrained(hf, local_files_only=True)(_TEXT).input_ids
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(f"transformers cannot load the tokenizer of {hf} ({_first_line(error)})") from None
    outcome.check()
    return torch.tensor(ids[:longest]), True


def _megatron_output(model: MegatronModel, tokens: torch.Tensor) -> torch.Tensor | None:
    """float32 [tokens, vocabulary or 1], on rank 0. Collective over the world."""
    groups, layout = model.groups, model.groups.layout
    batch = pack_sequences([tokens], layout)
    # Logits are computed where there is a target; here they are wanted everywhere.
    batch = dataclasses.replace(batch, targets=batch.input_ids)
    shard = batch.shard(layout.cp, groups.cp.rank())
    # Virtual stages want as many micro-batches as stages.
    batches = [shard] * (layout.pp if layout.vpp > 1 else 1)
    for chunk in model.chunks:
        chunk.eval()
    with torch.no_grad():
        outputs = run_pipeline(model, batches, lambda out, _: (out.sum(), {"out": out}), forward_only=True)
    whole = _whole(model, batch, outputs[0]["out"])[: tokens.numel()] if outputs else None
    return _to_rank_0(model, whole, tokens.numel())


def _whole(model: MegatronModel, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
    """Joins the vocabulary of tensor-parallel ranks and the tokens of context-parallel ones."""
    groups, layout = model.groups, model.groups.layout
    if model.role is Role.CAUSAL_LM:
        output = torch.cat(_gathered(output, groups.tp), dim=-1)
    if layout.cp == 1:
        return output
    order = torch.cat([zigzag_positions(batch.bounds, layout.cp, rank) for rank in range(layout.cp)])
    return torch.cat(_gathered(output, groups.cp))[order.argsort().to(output.device)]


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _to_rank_0(model: MegatronModel, whole: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
    layout = model.groups.layout
    last_stage = layout.world_size // layout.pp * (layout.pp - 1)  # its first rank: stages are the slowest dimension
    rank = dist.get_rank()
    if rank == last_stage != 0:
        assert whole is not None
        dist.send(whole.contiguous(), dst=0)
    if rank != 0:
        return None
    if whole is None:
        width = -(-model.vocab_size // layout.tp) * layout.tp if model.role is Role.CAUSAL_LM else 1
        whole = torch.empty(num_tokens, width, device=model.chunks[0].parameters().__next__().device)
        dist.recv(whole, src=last_stage)
    return whole.cpu()


def _scalar_head(model: MegatronModel, hf: Path) -> dict[str, torch.Tensor]:
    """The scalar head's tensors on rank 0: the folder's, or the model's own where it was drawn."""
    plan = plan_export(model)
    names = [name for name in plan.tensors if name.startswith("score.")]
    head = {name: tensor.cpu().clone() for name, tensor in export_hf(model, plan, names=names, to_rank=0)}
    reader = SafetensorsReader(hf)
    return {name: reader.read(name).float() if name in reader else tensor for name, tensor in head.items()}


class _Transformers:
    """The model in transformers, in float32 on weights rounded to the checkpoint's dtype."""

    def __init__(self, hf: Path, dtype: torch.dtype, head: dict[str, torch.Tensor] | None) -> None:
        """Loads it.

        Args:
            head: a scalar head's tensors; None for a language model.

        Raises:
            ConfigError: transformers cannot.
        """
        auto_class = transformers.AutoModelForCausalLM if head is None else transformers.AutoModel
        try:
            self._model = _load(auto_class, hf).eval()
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(f"transformers cannot load {hf} ({_first_line(error)})") from None
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(parameter.to(dtype))
        self._head = None if head is None else {name: tensor.to(dtype).float() for name, tensor in head.items()}

    @torch.no_grad()
    def output(self, tokens: torch.Tensor, attention: str | None = None) -> torch.Tensor:
        """float32 [tokens, vocabulary or 1]

        Args:
            attention: transformers' name of the way to compute attention; None: its default.
        """
        if attention is not None:
            self._model.set_attn_implementation(attention)
        output = self._model(tokens[None])
        if self._head is None:
            return output.logits[0]
        return F.linear(output.last_hidden_state[0], self._head["score.weight"], self._head.get("score.bias"))


def _load(auto_class: Any, hf: Path) -> transformers.PreTrainedModel:
    """The model in float32."""
    config = transformers.AutoConfig.from_pretrained(hf, local_files_only=True)
    if not hasattr(config, "quantization_config"):
        return auto_class.from_pretrained(hf, dtype=torch.float32, local_files_only=True)
    # transformers would compute with the 8-bit weights, for which it has GPU kernels only: it is given what they mean.
    del config.quantization_config
    reader = SafetensorsReader(hf)
    weights = {name: reader.read(name) for name in reader.names()}
    model_class = auto_class._model_mapping[type(config)]
    return model_class.from_pretrained(None, config=config, dtype=torch.float32, state_dict=weights)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found - expected).abs().max().item()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
