"""What megarl does at each router of Megatron-Core: replay, record, losses and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl.models.router import routers
from megarl.models.router_losses import MicroBatchLosses, expert_scores
from megarl.models.router_statistics import LayerStatistics


@dataclass(kw_only=True, slots=True)
class MicroBatchRouting:
    """What the routers of one chunk are told of one micro-batch, and what they tell."""

    replayed: torch.Tensor | None = None
    """int16 [tokens of the routers, mixtures of the chunk, top-k], on the device; -1 where a router chooses itself"""
    records: bool = False
    recorded: dict[int, torch.Tensor] = field(default_factory=dict)
    """By mixture of the chunk: int16 [tokens, top-k], -1 on padding"""
    losses: MicroBatchLosses | None = None


@dataclass
class RoutedPackedSeqParams(PackedSeqParams):
    """The parameters of a packed micro-batch with what its routers are told.

    Megatron-Core hands this object to every layer, also where a layer is computed again in the backward pass, by when
    other micro-batches have been through the layer. Its own `RouterReplay` has a queue for that instead, one list of
    routers for all models of a process, and no tokens that are routed freely among those that are replayed.
    """

    routing: MicroBatchRouting | None = None


class RouterHook:
    """Stands at one router."""

    def __init__(self, layer: TransformerLayer, place: int) -> None:
        """Takes the router of a layer over.

        Args:
            place: of the layer among the mixtures of its chunk.
        """
        self._router: TopKRouter = layer.mlp.router
        self._place = place
        self._routing: MicroBatchRouting | None = None
        self._real: torch.Tensor | None = None
        self._route_as_megatron = self._router.routing
        self.statistics: LayerStatistics | None = None
        """Where sums over updates go; None: none are made."""
        layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
        self._router.router_replay = self
        self._router.routing = self._route

    @property
    def layer_number(self) -> int:
        """Of the layer in the whole model, from 1."""
        return self._router.layer_number

    @property
    def topk(self) -> int:
        return self._router.topk

    def _before_layer(self, layer: TransformerLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        packed = kwargs.get("packed_seq_params")
        self._routing = packed.routing if isinstance(packed, RoutedPackedSeqParams) else None

    def _route(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In the place of `TopKRouter.routing`: logits [tokens, 1, experts] → weights and choice [tokens, experts]."""
        self._real = None if padding_mask is None else ~padding_mask.reshape(-1)
        probs, routing_map = self._route_as_megatron(logits, padding_mask=padding_mask)
        # With recomputation a layer's first pass has no gradient, and the second one has: each token counts once.
        if torch.is_grad_enabled():
            probs = self._learn(logits.view(-1, logits.shape[-1]), probs, routing_map)
        return probs, routing_map

    def _learn(self, logits: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """Adds the losses to what the backward pass of `probs` computes, and to the statistics."""
        losses = None if self._routing is None else self._routing.losses
        if self.statistics is None and losses is None:
            return probs
        with torch.set_grad_enabled(losses is not None):
            scores = expert_scores(logits, self._router.score_function)
        if self.statistics is not None and self._real is not None:
            with torch.no_grad():
                self.statistics.add_choice(routing_map, scores.detach(), self._real)
        return probs if losses is None else self._with_losses(losses, logits, scores, probs)

    def _with_losses(
        self, losses: MicroBatchLosses, logits: torch.Tensor, scores: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        weights = losses.weights
        zero = scores.new_zeros(())
        aux_loss = losses.aux_loss(scores, self.topk) if weights.aux_loss else zero
        z_loss = losses.z_loss(logits.float()) if weights.z_loss else zero
        if self.statistics is not None:
            self.statistics.add_losses(aux_loss.detach(), z_loss.detach())
        return _AddToBackward.apply(probs, weights.aux_loss * aux_loss + weights.z_loss * z_loss)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which experts a token goes to, and their scores, which have a gradient whoever chose.

        Megatron-Core calls this with the scores that a choice is made from, and makes weights of the outcome as the
        model's family does.

        Args:
            scores: [tokens, experts].
            choose: Megatron-Core's own choice, within groups of experts where the model has them.
        """
        values, own = choose(scores, topk, num_groups, group_topk)
        routing = self._routing
        if routing is None:
            return values, own
        chosen = own
        if routing.replayed is not None:
            replayed = routing.replayed[:, self._place].long()
            is_given = replayed[:, :1] >= 0
            chosen = torch.where(is_given, replayed, own)
            values = scores.gather(1, chosen)
            if self.statistics is not None and torch.is_grad_enabled():
                self.statistics.add_replay(own, replayed, self._compared(is_given.squeeze(1)))
        if routing.records:
            kept = chosen.to(torch.int16)
            routing.recorded[self._place] = kept if self._real is None else kept.where(self._real.unsqueeze(1), -1)
        return values, chosen

    def _compared(self, is_given: torch.Tensor) -> torch.Tensor:
        return is_given if self._real is None else is_given & self._real


class _AddToBackward(torch.autograd.Function):
    """Hands `probs` on, and in the backward pass gives `loss` the gradient 1: it is a part of the whole loss."""

    @staticmethod
    def forward(context: Any, probs: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(loss)
        return probs.view_as(probs)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = context.saved_tensors
        return gradient, torch.ones_like(loss)


def install_router_hooks(chunk: torch.nn.Module) -> None:
    """Puts a hook at each router of a chunk."""
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    mixtures = [layer for layer in layers if isinstance(getattr(layer.mlp, "router", None), TopKRouter)]
    for place, layer in enumerate(mixtures):
        RouterHook(layer, place)


def router_hooks(chunks: Sequence[Any]) -> Iterator[RouterHook]:
    """Those of these chunks, in the order of layers."""
    return (router.router_replay for router in routers(chunks))
