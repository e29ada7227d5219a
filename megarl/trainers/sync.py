"""Weights from the trainer to this rank's engine, checked."""

from __future__ import annotations

import torch.distributed as dist

from megarl import platform
from megarl.config.engines import engine_expert_shares
from megarl.config.schema import RolloutConfig
from megarl.models.build import MegatronModel
from megarl.rollout.engine import Engine, WeightUpdateError
from megarl.weights.bucket_stream import BucketStream, Traffic
from megarl.weights.plan import EngineLayout
from megarl.weights.sync_source import make_bucket_stream
from megarl.weights.together import SharedOutcome

_MEGABYTE = 2**20
"""verl's, in `update_weights_bucket_megabytes`."""

_BUCKET_MEGABYTES = {"cpu": 128, "cuda": 512}
"""Where the config has none. On a GPU verl's and slime's: a small part of its memory, and sending one takes far longer
than starting to. On a CPU the 3 ms that SGLang's processes take to hand a bucket on count as well."""


def plan_sync(model: MegatronModel, rollout: RolloutConfig) -> BucketStream:
    """What `sync_weights` walks. Collective over the world; made once for a model."""
    megabytes = rollout.update_weights_bucket_megabytes or _BUCKET_MEGABYTES[platform.current().kind]
    mapped = rollout.engine == "sglang" and not rollout.servers
    return make_bucket_stream(model, _engine_layout(rollout), bucket_bytes=megabytes * _MEGABYTE, mapped=mapped)


def _engine_layout(rollout: RolloutConfig) -> EngineLayout:
    if rollout.servers:
        return EngineLayout(tp=dist.get_world_size() // len(rollout.servers), by_first_rank=True)
    return EngineLayout(tp=rollout.tensor_model_parallel_size, ep=engine_expert_shares(rollout))


def sync_weights(stream: BucketStream, engine: Engine, version: int, *, check: bool) -> Traffic:
    """Gives the engine of this rank the model's weights. Collective over the world.

    What fails in one engine is raised on all ranks when all buckets have gone round: until then its rank goes on giving
    the others what it holds, and none waits for it. The engines that were served have the new weights then, and the
    others none; another sync makes them equal.

    Args:
        version: the number of optimizer steps that the weights have seen.
        check: compare a checksum of each tensor as the trainer holds it with that of what the engine then holds.

    Returns:
        What this rank moved.

    Raises:
        WeightUpdateError: on every rank, with tensor, rank and cause; an engine refused a bucket, is gone, or holds
            something else than was sent.
    """
    outcome = SharedOutcome(WeightUpdateError)
    doing = f"sync of the weights of version {version}: rank {dist.get_rank()}'s engine failed"
    with outcome.attempt_any(doing):
        engine.begin_weight_update(version)
    for bucket in stream.buckets(stream.checksums() if check else None):
        if outcome.problem is None:
            with outcome.attempt_any(doing):
                engine.receive_bucket(bucket)
    if outcome.problem is None:
        with outcome.attempt_any(doing):
            engine.end_weight_update()
    outcome.check()
    return stream.traffic
