"""A transformers model as two functions: prefill of whole prompts, and one decoding step of many responses.

transformers' own modules do the arithmetic, so every family is what transformers makes of it. What is ours is around
them: attention over slots that are written in place, without a mask built anew in each call; log-probs only of last
tokens; and on a CPU linear layers with packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from megarl.rollout.kv_cache import PrefillCache, Prefix, SlotCache
from megarl.rollout.packed_linear import can_pack, pack_linears
from megarl.rollout.router_recorder import RouterRecorder

_ATTENTION = "megarl_rollout"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: causal in a prefill (no mask), over slots in decoding (with a mask).

    Args:
        query: [rows, heads, tokens, width].
        key, value: [rows, key-value heads, tokens read, width].
        attention_mask: in decoding [rows, 1, 1, tokens read] float32, to be added to the scores.

    Returns:
        [rows, tokens, heads, width of values]; transformers wants attention weights as the second, and gets none.
    """
    if attention_mask is None:
        several, heads_per_key = query.shape[2] > 1, query.shape[1] != key.shape[1]
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=several, scale=scaling, enable_gqa=heads_per_key
        )
        return mixed.transpose(1, 2), None
    rows, heads, _, width = query.shape
    # The heads that share a key-value head are the rows of one product. torch's own attention takes one token's heads
    # one by one, six times slower in bfloat16 on a CPU.
    scores = torch.matmul(query.view(rows, key.shape[1], -1, width), key.transpose(2, 3)).float()
    weights = scores.mul_(width**-0.5 if scaling is None else scaling).add_(attention_mask).softmax(dim=-1)
    return torch.matmul(weights.to(value.dtype), value).view(rows, 1, heads, -1), None


AttentionInterface.register(_ATTENTION, _attention)


class Decoder:
    """A causal language model, ready to generate once it has been given weights."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rows: int,
        record_experts: bool = False,
    ) -> None:
        """Builds the model without drawing weights.

        Args:
            config: as `megarl.models.bridge.read_hf_config` gives it, which refuses all but attention over the whole
                sequence.
            dtype: of the weights and of all arithmetic but that of log-probs.
            rows: responses of a decoding step, which packed weights are laid out for.
            record_experts: listen to the routers of a mixture of experts.
        """
        with no_init_weights(), torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_ATTENTION)
        model.tie_weights()  # part of the drawing that was left out
        model.eval().requires_grad_(False)
        for name, buffer in model.named_buffers():
            # The trainer keeps it in float32, and so do engines: rounded, it sends tokens to other experts.
            if name.endswith(".e_score_correction_bias"):
                buffer.data = buffer.data.float()
        self.model = model
        self.device = device
        self.max_positions: int = config.max_position_embeddings
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.recorder = RouterRecorder(model) if record_experts else None
        """Has the experts of the last `decode`, where they are recorded; those of a prefill are in its prefixes."""
        self._rows = rows
        self._packed = pack_linears(model) if can_pack(device, dtype) else []
        self._body = model.base_model
        self._head = model.get_output_embeddings()

    def weights_changed(self) -> None:
        """Lays packed weights out anew."""
        for layer in self._packed:
            layer.pack(self._rows)

    def free_copies(self) -> None:
        """Frees packed weights, until `weights_changed`."""
        for layer in self._packed:
            layer.unpack()

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Runs whole prompts, padded on the right to the longest: causal attention then needs no mask."""
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        cache = PrefillCache()
        positions = torch.arange(max(lengths), device=self.device).expand(len(prompts), -1)
        hidden = self._run(ids.to(self.device), positions, cache, None)
        last = hidden[torch.arange(len(prompts)), torch.tensor(lengths) - 1]
        logits = self._head(last).float()
        experts = None if self.recorder is None else self.recorder.take().reshape(*ids.shape, *self.recorder.shape)
        return [
            cache.prefix(row, length, logits[row], None if experts is None else experts[row, :length].copy())
            for row, length in enumerate(lengths)
        ]

    @torch.inference_mode()
    def decode(self, cache: SlotCache, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Runs one token of each running response.

        Args:
            tokens: [running], in the order of slots.
            positions: [running] of these tokens in prompt and response.

        Returns:
            [running, vocabulary] float32 logits of the next token.
        """
        length = max(positions) + 1
        position = torch.tensor(positions, device=self.device)
        cache.begin_step(position, length)
        unread = torch.arange(length, device=self.device) > position.unsqueeze(1)
        mask = torch.zeros(unread.shape, device=self.device).masked_fill_(unread, float("-inf"))[:, None, None]
        ids = torch.tensor(tokens, device=self.device).unsqueeze(1)
        hidden = self._run(ids, position.unsqueeze(1), cache, mask)
        return self._head(hidden[:, 0]).float()

    def _run(self, ids: Tensor, positions: Tensor, cache: PrefillCache | SlotCache, mask: Tensor | None) -> Tensor:
        """Hidden states after the last norm, [rows, tokens, hidden]."""
        output = self._body(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return output.last_hidden_state
