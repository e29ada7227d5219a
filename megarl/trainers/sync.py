"""Weights from the trainer to this rank's engine, checked."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megarl.models.build import MegatronModel
from megarl.rollout.engine import Engine
from megarl.weights.checksum import checksum
from megarl.weights.export_hf import ExportPlan, export_hf


def sync_weights(model: MegatronModel, plan: ExportPlan, engine: Engine, version: int, *, check: bool) -> int:
    """Streams `model`'s weights to the engine of this rank. Collective over the world.

    Args:
        version: the number of optimizer steps that the weights have seen.
        check: compare a checksum of each tensor as it was sent with that of what the engine then holds.

    Returns:
        Bytes that this rank's engine received.

    Raises:
        RuntimeError: a tensor arrived changed; the message names it.
    """
    sent: dict[str, int] = {}
    received = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal received
        for name, tensor in export_hf(model, plan):
            wanted = tensor.to(engine.weight_dtype(name))
            received += wanted.nbytes
            if check:
                sent[name] = checksum(wanted)
            yield name, wanted

    engine.begin_weight_update(version)
    engine.receive_weights(stream())
    held = engine.end_weight_update(checksums=check)
    different = [name for name in sent if held.get(name) != sent[name]]
    if different:
        raise RuntimeError(
            f"weight sync {version}: {len(different)} of {len(sent)} tensors arrived changed, the first is "
            f"{different[0]}; the engine would generate with wrong weights, so the run stops"
        )
    return received
