"""Weights from the trainer to this rank's engine, checked."""

from __future__ import annotations

from megarl.models.build import MegatronModel
from megarl.rollout.engine import Engine
from megarl.weights.checksum import mismatches, with_checksums
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
    stream = export_hf(model, plan)
    if check:
        stream = with_checksums(stream, sent, engine.weight_dtype)
    engine.begin_weight_update(version)
    engine.receive_weights(stream)
    different = mismatches(sent, engine.end_weight_update(checksums=check))
    if different:
        raise RuntimeError(
            f"weight sync {version}: {len(different)} of {len(sent)} tensors arrived changed, the first is "
            f"{different[0]}; the engine would generate with wrong weights, so the run stops"
        )
    return sum(info.num_bytes for info in plan.tensors.values())
