"""Runs a model over packed micro-batches through Megatron-Core's pipeline schedules.

The same call serves one process and PP × VPP: a schedule asks for a micro-batch's forward pass on this stage and moves
activations and gradients between stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.data.packing import PackedBatch
from megarl.models.build import MegatronModel
from megarl.models.router import padding_mask
from megarl.models.router_hook import MicroBatchRouting, RoutedPackedSeqParams
from megarl.models.router_replay import RouterPass
from megarl.platform.progress import PROGRESS

OutputFunction = Callable[[torch.Tensor, PackedBatch], tuple[torch.Tensor, dict[str, Any]]]
"""What the last stage makes of the model's output.

Takes the output — logits [selected tokens, vocabulary ÷ tp], or values [tokens, 1] of a scalar head — and the
micro-batch, both of this context-parallel rank. Gives the loss (a scalar, already divided by the global mini-batch;
summed over micro-batches, data- and context-parallel ranks it is the loss) and whatever is to be handed back.
"""


def run_pipeline(
    model: MegatronModel,
    batches: Sequence[PackedBatch],
    output_function: OutputFunction,
    *,
    forward_only: bool,
    chunks: Sequence[torch.nn.Module] | None = None,
    routers: RouterPass | None = None,
) -> list[dict[str, Any]]:
    """Forward, or forward and backward, over `batches`. Collective over the model-parallel group.

    Args:
        batches: the micro-batches of this data-parallel rank, each this context-parallel rank's shard, on the device.
            With PP > 1 all have the same number of tokens, on all stages; with VPP > 1 there are a multiple of PP.
        forward_only: compute no gradients; the loss that `output_function` gives is not used.
        chunks: what to call instead of `model.chunks`, such as their data-parallel wrappers.
        routers: what routers do besides choosing by themselves; None: nothing.

    Returns:
        What `output_function` handed back for each micro-batch, on the last stage; an empty list on the others.
    """
    _check(model, batches)
    chunks = list(model.chunks if chunks is None else chunks)

    def forward_step(
        iterator: Iterator[tuple[int, int, PackedBatch]], chunk: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable]:
        number, index, shard = next(iterator)
        PROGRESS.begin_micro_batch(index + 1, len(batches))
        if model.selector is not None:
            model.selector.positions = shard.selected
        output = chunk(
            shard.input_ids.unsqueeze(0),
            shard.positions.unsqueeze(0),
            None,
            packed_seq_params=_packed_seq_params(
                shard, None if routers is None else routers.routing(number, index, shard)
            ),
            padding_mask=padding_mask(model.groups, chunk, shard),
        )

        def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            loss, handed_back = output_function(output.squeeze(0), shard)
            # The count is unused: `train.TrainableModel` finalises gradients without it.
            return loss, torch.ones((), dtype=torch.int, device=loss.device), handed_back

        return output, loss_function

    iterators = [iter([(number, index, batch) for index, batch in enumerate(batches)]) for number in range(len(chunks))]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=batches[0].total_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _check(model: MegatronModel, batches: Sequence[PackedBatch]) -> None:
    if not batches:
        raise ValueError("no micro-batches to run; a rank without samples still takes part, with a pack of padding")
    layout = model.groups.layout
    lengths = {batch.total_tokens for batch in batches}
    if layout.pp > 1 and len(lengths) > 1:
        raise ValueError(f"with pipeline parallelism all micro-batches have one length, not {sorted(lengths)} tokens")
    if layout.vpp > 1 and len(batches) % layout.pp:
        raise ValueError(f"with virtual pipeline stages the {len(batches)} micro-batches must divide by PP {layout.pp}")


def _packed_seq_params(shard: PackedBatch, routing: MicroBatchRouting | None) -> RoutedPackedSeqParams:
    bounds, cu_seqlens = shard.bounds, shard.cu_seqlens.to(shard.input_ids.device)
    # The longest sequence itself, never a rounded number: a value equal to the whole pack's length makes
    # Megatron-Core's rotary embedding count positions through the pack instead of within each sequence.
    longest = max(stop - start for start, stop in itertools.pairwise(bounds))
    return RoutedPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        routing=routing,
    )
