"""A bucket reaches another process as a handle: what arrives is what was sent, or is named."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.rollout.engine import WeightUpdateError
from megarl.rollout.sglang.environment import CPU_STANDINS
from megarl.rollout.sglang.payload import arrived, payload_of
from megarl.weights.bucket import Bucket, pack
from megarl.weights.checksum import checksum
from tests.launch import ROOT


def make_bucket(seed: int, count: int) -> Bucket:
    torch.manual_seed(seed)
    tensors = [
        (f"layer.{i}.weight", torch.randn(3 + i, 5).to(torch.bfloat16 if i % 2 else torch.float32))
        for i in range(count)
    ]
    return pack(tensors, {name: checksum(tensor) for name, tensor in tensors}, mapped=True)


def contents(payload: bytes) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in arrived(pickle.loads(payload))}


READER = """
import pickle, sys, torch
from megarl.rollout.sglang.payload import arrived
read = arrived(pickle.load(open(sys.argv[1], "rb")))
torch.save({name: tensor.clone() for name, tensor in read}, sys.argv[2])
"""


def test_another_process_has_the_tensors_bit_for_bit(tmp_path: Path) -> None:
    bucket = make_bucket(0, 5)
    (tmp_path / "payload").write_bytes(payload_of(bucket))
    subprocess.run([sys.executable, "-c", READER, tmp_path / "payload", tmp_path / "out.pt"], check=True, cwd=ROOT)
    read = torch.load(tmp_path / "out.pt")
    assert list(read) == [entry.name for entry in bucket.entries]
    for name, tensor in bucket.tensors():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_a_payload_is_small_however_large_the_bucket() -> None:
    large = pack([("weight", torch.zeros(1 << 20))], mapped=True)
    assert len(payload_of(large)) < 1000


def test_buckets_of_any_order_of_sizes_follow_one_another() -> None:
    for seed, count in enumerate((2, 6, 1, 6, 0)):
        bucket = make_bucket(seed, count)
        read = contents(payload_of(bucket))
        assert all(torch.equal(read[name], tensor) for name, tensor in bucket.tensors())
        assert len(read) == count


def test_a_tensor_that_changed_on_the_way_is_named() -> None:
    bucket = make_bucket(0, 5)
    bucket.data[bucket.entries[3].offset] ^= 1
    with pytest.raises(WeightUpdateError, match=r"layer\.3\.weight arrived changed"):
        contents(payload_of(bucket))


def test_without_checksums_nothing_is_compared() -> None:
    bucket = make_bucket(0, 5)
    bucket.data[0] ^= 1
    assert len(contents(payload_of(dataclasses.replace(bucket, checksums=None)))) == 5


def test_nothing_is_left_in_memory_when_the_bucket_is_gone() -> None:
    before = shared_memory(), open_buckets()
    payload_of(make_bucket(0, 5))
    assert (shared_memory(), open_buckets()) == before


def shared_memory() -> set[str]:
    """Files of this process: others come and go."""
    return {name for name in os.listdir("/dev/shm") if "megarl" in name or f"_{os.getpid()}_" in name}


def open_buckets() -> int:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("megarl-bucket" in name for name in names)


@pytest.mark.parametrize("package", ["sgl_kernel", "torchvision"])
def test_a_stand_in_refuses_to_be_imported_where_there_is_cuda(package: str) -> None:
    program = f"import torch; torch.cuda.is_available = lambda: True; import {package}"
    environment = {**os.environ, "PYTHONPATH": str(CPU_STANDINS)}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert "stand-in for machines without CUDA" in result.stderr


FINDER = """
import importlib.util, megarl.rollout.sglang_engine
print([spec.origin for name in ("sgl_kernel", "torchvision") if (spec := importlib.util.find_spec(name))])
"""


def test_a_rank_does_not_see_the_stand_ins() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", FINDER]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert str(CPU_STANDINS) not in result.stdout
