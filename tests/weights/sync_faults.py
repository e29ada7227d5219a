"""What goes wrong in a sync, and what a sync takes of memory, on ranks that `tests.spawn` starts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megarl.config.layout import Layout
from megarl.models.bridge import read_hf_config
from megarl.models.build import build_model
from megarl.parallel.groups import build_groups
from megarl.rollout.transformers_engine import TransformersEngine
from megarl.trainers.sync import sync_weights
from megarl.weights.bucket import Bucket
from megarl.weights.bucket_stream import BucketStream
from megarl.weights.load_hf import load_hf
from megarl.weights.plan import EngineLayout
from megarl.weights.sync_source import make_bucket_stream
from tests.weights.memory_meter import MemoryMeter

NORM = "model.layers.1.post_attention_layernorm.weight"


def stream_and_engine(
    folder: Path, layout: dict[str, int], bucket_bytes: int
) -> tuple[BucketStream, TransformersEngine, list[torch.Tensor]]:
    groups = build_groups(Layout(world_size=dist.get_world_size(), **layout))
    hf_config = read_hf_config(folder)
    model = build_model(hf_config, groups, dtype=torch.float32)
    load_hf(model, folder)
    engine = TransformersEngine(folder, dtype=torch.float32, max_num_seqs=1)
    stream = make_bucket_stream(model, EngineLayout(), bucket_bytes=bucket_bytes, mapped=False)
    tensors = [parameter.data for chunk in model.chunks for parameter in chunk.parameters()]
    return stream, engine, tensors


def outcome_of(stream: BucketStream, engine: TransformersEngine, version: int) -> str:
    try:
        sync_weights(stream, engine, version, check=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"version {engine.weight_version}"


def faults(folder: Path, layout: dict[str, int]) -> dict[str, str]:
    """What this rank is told where the engine of rank 1 gets a wrong byte, dies, refuses, and then is sound again."""
    stream, engine, _ = stream_and_engine(folder, layout, 100_000)
    take, unlucky = engine.receive_bucket, dist.get_rank() == 1
    told = {}

    def receive_wrong_byte(bucket: Bucket) -> None:
        tensors = dict(bucket.tensors())
        if NORM in tensors:
            tensors[NORM].view(torch.uint8)[9] ^= 4
        take(bucket)

    def die(bucket: Bucket) -> None:
        raise ConnectionResetError("the engine's process is gone")

    def refuse_begin(version: int) -> None:
        raise RuntimeError("the engine's weights are asleep")

    if unlucky:
        engine.receive_bucket = receive_wrong_byte
    told["wrong byte"] = outcome_of(stream, engine, 1)
    if unlucky:
        engine.receive_bucket = die
    told["dead"] = outcome_of(stream, engine, 2)
    if unlucky:
        engine.receive_bucket = take
        begin, engine.begin_weight_update = engine.begin_weight_update, refuse_begin
    told["refused"] = outcome_of(stream, engine, 3)
    if unlucky:
        engine.begin_weight_update = begin
    told["sound"] = outcome_of(stream, engine, 4)
    return told


def wrong_sender(folder: Path) -> str:
    """What this rank is told where a message changes on its way from rank 1's parameters to rank 0's bucket."""
    stream, engine, _ = stream_and_engine(folder, {"tp": 2}, 100_000)
    fill = stream._fill

    def fill_wrongly(step: object, bucket: Bucket, staging: torch.Tensor) -> None:
        if dist.get_rank() == 0 and NORM not in {entry.name for entry in bucket.entries}:
            staging[-5] ^= 1
        fill(step, bucket, staging)

    stream._fill = fill_wrongly
    return outcome_of(stream, engine, 1)


def peak(folder: Path, layout: dict[str, int], bucket_bytes: int) -> tuple[int, int]:
    """Bytes that a sync takes at its peak beside parameters and engine, and the bytes that its engine takes."""
    stream, engine, tensors = stream_and_engine(folder, layout, bucket_bytes)
    engine._decoder._packed = []  # a copy of the weights in another order, which is not the sync's
    with MemoryMeter([*tensors, *engine._tensors.values()]) as meter:
        traffic = sync_weights(stream, engine, 1, check=True)
    return meter.peak, traffic.taken
