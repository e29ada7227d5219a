"""The proof of `--verify`: every tensor bit for bit, and the logits beside transformers.

The ranks share the tensors out. What they find goes into `verify.json` beside the result.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import is_first_rank, refuse, say

from megarl.models.build import MegatronModel
from megarl.weights.exchange import exchange, plan_wanted
from megarl.weights.export_hf import plan_export
from megarl.weights.safetensors_io import SafetensorsReader
from megarl.weights.together import SharedOutcome

REPORT_NAME = "verify.json"

_CHUNK_ELEMENTS = 2**22
"""Tensors are cast and hashed in chunks, so that a cast makes no second copy of a large one."""

_LARGEST_LIST = 3
"""How many tensor names a sentence lists."""


@dataclass(slots=True)
class TensorReport:
    """What the comparison of tensors found; filled on rank 0."""

    tensors: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Of the source, which the model has no place for: the output layer of a critic's source, for one."""
    added: list[str] = field(default_factory=list)
    """Of the result, which the source lacks: a scalar head that was drawn."""

    def add(self, name: str, source: TensorHash, result: TensorHash | None, **more: str) -> None:
        """Records one tensor of the source and what became of it."""
        self.tensors.append(
            {
                "name": name,
                "shape": list(source.shape),
                "dtype": source.dtype,
                "sha256": source.sha256,
                "result_sha256": result.sha256 if result else None,
                "equal": result is not None and (source.sha256, source.shape) == (result.sha256, result.shape),
                **({"compared_as": source.compared_as} if source.compared_as != source.dtype else {}),
                **more,
            }
        )

    @property
    def different(self) -> list[str]:
        return [entry["name"] for entry in self.tensors if not entry["equal"]]

    @property
    def casts(self) -> list[str]:
        """Where the result has another dtype, the source is compared as it is after the cast."""
        pairs = {(entry["dtype"], entry["compared_as"]) for entry in self.tensors if "compared_as" in entry}
        return [f"{source} → {result}" for source, result in sorted(pairs)]


@dataclass(frozen=True, slots=True)
class TensorHash:
    """A tensor's identity without its values."""

    shape: tuple[int, ...]
    dtype: str
    """Of the tensor itself."""
    compared_as: str
    """The dtype whose bytes were hashed."""
    sha256: str


def hash_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorHash:
    """SHA-256 of the tensor's elements in row-major order, cast to `dtype` first (None: as they are)."""
    dtype = dtype or tensor.dtype
    digest = hashlib.sha256()
    for chunk in tensor.detach().reshape(-1).split(_CHUNK_ELEMENTS):
        digest.update(chunk.to(device="cpu", dtype=dtype).contiguous().view(torch.uint8).numpy())
    return TensorHash(tuple(tensor.shape), _name(tensor.dtype), _name(dtype), digest.hexdigest())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare_with_source(model: MegatronModel, hf: Path) -> TensorReport:
    """Compares what the model gives back with the Hugging Face folder it came from. Collective over the world.

    The ranks share the tensors out.
    """
    report = TensorReport()
    reader = SafetensorsReader(hf)
    plan = plan_export(model)
    names, num_ranks = list(plan.tensors), dist.get_world_size()
    pairs: dict[str, _Pair] = {}
    for tensors in exchange(plan, plan_wanted(plan, [names[rank::num_ranks] for rank in range(num_ranks)])):
        for name, tensor in tensors:
            source = hash_tensor(reader.read(name), tensor.dtype) if name in reader else None
            pairs[name] = (source, hash_tensor(tensor))
    pairs = _gathered(pairs)
    if not is_first_rank():
        return report
    for name in names:
        source, result = pairs[name]
        if source is None:
            report.added.append(name)
        else:
            report.add(name, source, result)
    for name in reader.names():
        if name in plan.tensors:
            continue
        if name == "lm_head.weight" and model.tied:
            # Some folders store the tied output layer too. It is left out, which is right only if it is the same.
            source = hash_tensor(reader.read(name), model.dtype)
            report.add(name, source, pairs["model.embed_tokens.weight"][1], given_back_as="model.embed_tokens.weight")
        else:
            report.left_out.append(name)
    return report


def compare_with_result(
    exported: Mapping[str, TensorHash], hf: Path, original: Mapping[str, str] | None
) -> TensorReport:
    """Compares what a model gave with the Hugging Face folder that was written. Collective over the world.

    Args:
        exported: the tensors that this rank was shown as they were streamed.
        original: the hashes of the tensors that the checkpoint was once made from, where they are known; then the
            result has to equal them too.
    """
    report = TensorReport()
    reader = SafetensorsReader(hf)
    pairs: dict[str, _Pair] = {
        name: (source, hash_tensor(reader.read(name)) if name in reader else None) for name, source in exported.items()
    }
    pairs = _gathered(pairs)
    if not is_first_rank():
        return report
    in_order = [name for name in reader.names() if name in pairs]
    for name in [*in_order, *(pairs.keys() - set(in_order))]:
        source, result = pairs[name]
        assert source is not None
        if original is None or name not in original:
            report.add(name, source, result)
            continue
        report.add(name, source, result, original_sha256=original[name])
        report.tensors[-1]["equal"] &= original[name] == source.sha256
    report.added = sorted(set(reader.names()) - pairs.keys())
    return report


_Pair = tuple[TensorHash | None, TensorHash | None]
"""Of a tensor at the source and in the result; None where it is not."""


def _gathered(pairs: dict[str, _Pair]) -> dict[str, _Pair]:
    """What all ranks found, on rank 0."""
    found: list[dict[str, _Pair]] = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(pairs, found if is_first_rank() else None)
    return {name: pair for of_rank in found for name, pair in of_rank.items()}


def original_hashes(checkpoint: Path) -> dict[str, str] | None:
    """The hashes that `hf_to_megatron.py --verify` left beside a checkpoint."""
    file = checkpoint / REPORT_NAME
    if not file.exists():
        return None
    return {entry["name"]: entry["sha256"] for entry in json.loads(file.read_text())["tensors"]}


def conclude(report: TensorReport, logits: dict[str, Any] | None, *, source: Path, result: Path) -> bool:
    """Writes verify.json into `result` and says what was found. Collective over the world.

    Args:
        logits: of `compare_logits`; None: they were not to be compared.

    Returns:
        Whether everything agrees, on every rank.
    """
    outcome = SharedOutcome()
    ok = [False]
    if is_first_rank():
        ok = [not report.different and (logits is None or _are_close(logits))]
        content = {
            "source": str(source),
            "result": str(result),
            "ok": ok[0],
            "totals": {
                "tensors": len(report.tensors),
                "equal": len(report.tensors) - len(report.different),
                "different": len(report.different),
                "left_out": len(report.left_out),
                "added": len(report.added),
            },
            "casts": report.casts,
            "left_out": report.left_out,
            "added": report.added,
            "logits": logits and logits | {key: _finite(logits[key]) for key in ("max_abs_difference", "limit")},
            "tensors": report.tensors,
        }
        with outcome.attempt(result):
            _write(result / REPORT_NAME, json.dumps(content, indent=2, allow_nan=False) + "\n")
        _say(report, logits, source, result)
    outcome.check()
    dist.broadcast_object_list(ok, src=0)
    return ok[0]


def _are_close(logits: dict[str, Any]) -> bool:
    return logits["max_abs_difference"] <= logits["limit"]


def _finite(number: float) -> float | None:
    """JSON has no word for other numbers."""
    return number if math.isfinite(number) else None


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.partial")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(file)


def _say(report: TensorReport, logits: dict[str, Any] | None, source: Path, result: Path) -> None:
    equal = len(report.tensors) - len(report.different)
    cast = f", after the cast {', '.join(report.casts)}" if report.casts else ""
    say(f"tensors: {equal} of {len(report.tensors)} bit for bit equal{cast}")
    for what, names in (("left out", report.left_out), ("added", report.added)):
        if names:
            say(f"{what}: {_listed(names)}")
    if logits is not None:
        say(f"logits: {logits['max_abs_difference']:.2e} at most from transformers' (limit {logits['limit']:.1e})")
    problems = []
    if report.different:
        problems.append(f"{_listed(report.different)} of {result} differ from their source")
    if logits is not None and _finite(logits["max_abs_difference"]) is None:
        problems.append(f"logits are NaN or infinite, so they prove nothing: {source} may hold weights that are")
    elif logits is not None and not _are_close(logits):
        problems.append(
            f"the logits of {result} are {logits['max_abs_difference']:.2e} from transformers', more than the limit "
            f"{logits['limit']:.1e}"
        )
    if problems:
        refuse([f"not verified: {text}; do not use it, see {result / REPORT_NAME}" for text in problems])


def _listed(names: list[str]) -> str:
    more = len(names) - _LARGEST_LIST
    return ", ".join(names[:_LARGEST_LIST]) + (f" and {more} more tensors" if more > 0 else "")
