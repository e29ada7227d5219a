"""What the ranks of the checkpoint tests do. Each function runs on every rank of a world."""

from __future__ import annotations

import logging
import resource
import signal
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import platform

platform.current()  # prepares Megatron-Core before anything imports it
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

from megarl.checkpoint.weights import load_weights, save_weights  # noqa: E402
from megarl.config.errors import ConfigError  # noqa: E402
from megarl.config.layout import Layout  # noqa: E402
from megarl.models.bridge import read_hf_config  # noqa: E402
from megarl.models.build import MegatronModel, Role, build_model  # noqa: E402
from megarl.parallel.groups import Groups, build_groups  # noqa: E402
from megarl.weights.export_hf import export_hf  # noqa: E402
from megarl.weights.load_hf import load_hf  # noqa: E402
from megarl.weights.safetensors_io import SafetensorsReader  # noqa: E402


def groups_of(**sizes: int) -> Groups:
    return build_groups(Layout(world_size=dist.get_world_size(), **sizes))


def fresh_model(hf: Path, groups: Groups, **settings: object) -> MegatronModel:
    """A model whose every parameter is NaN, so that what was not loaded shows."""
    model = build_model(read_hf_config(hf), groups, **{"dtype": torch.float32, **settings})
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    return model


def different_tensors(model: MegatronModel, hf: Path) -> list[str]:
    """Names of what the model gives back otherwise than the Hugging Face folder has it."""
    reader = SafetensorsReader(hf)
    exported = {name: tensor.clone() for name, tensor in export_hf(model)}
    names = set(reader.names()) | exported.keys()
    return sorted(n for n in names if n not in exported or n not in reader or not equal(exported[n], reader.read(n)))


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def save_in(sizes: dict, models: Path, checkpoints: Path, names: list[str]) -> None:
    """Hugging Face folders → checkpoints, from one layout."""
    groups = groups_of(**sizes)
    for name in names:
        model = fresh_model(models / name, groups)
        load_hf(model, models / name)
        save_weights(model, checkpoints / name, models / name)


def load_in(layouts: list[dict], models: Path, checkpoints: Path, names: list[str]) -> dict[str, dict[str, object]]:
    """Checkpoints → models of several layouts, compared with the Hugging Face folders."""
    results: dict[str, dict[str, object]] = {}
    for sizes in layouts:
        groups = groups_of(**sizes)
        for name in names:
            if groups.layout.ep > 1 and "moe" not in name:
                continue
            model = fresh_model(models / name, groups)
            load_weights(model, checkpoints / name)
            key = f"{name} {groups.layout.describe()}"
            results[key] = {"different": different_tensors(model, models / name), "padding": padding_sum(model)}
    return results


def padding_sum(model: MegatronModel) -> float:
    """The sum of absolute values in rows that pad the vocabulary: NaN where they were not set."""
    total = 0.0
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                first = model.groups.tp.rank() * parameter.size(0)
                total += parameter[max(model.vocab_size - first, 0) :].abs().sum().item()
    return total


def bfloat16_to_float32(models: Path, checkpoints: Path, name: str) -> bool:
    """Whether a bfloat16 checkpoint loads into a float32 model with the rounded values."""
    groups = groups_of()
    rounded = fresh_model(models / name, groups, dtype=torch.bfloat16)
    load_hf(rounded, models / name)
    save_weights(rounded, checkpoints / "bfloat16", models / name)
    model = fresh_model(models / name, groups)
    load_weights(model, checkpoints / "bfloat16")
    pairs = zip(model.chunks[0].parameters(), rounded.chunks[0].parameters(), strict=True)
    return all(equal(mine, other.float()) for mine, other in pairs)


def message(action: object) -> str:
    try:
        action()  # type: ignore[operator]
    except ConfigError as error:
        return str(error)
    return "nothing was wrong"


def refused_loads(models: Path, checkpoints: Path, damaged: dict[str, Path]) -> dict[str, str]:
    """What loading says about checkpoints that are not the model's, or damaged."""
    groups = groups_of()
    llama = fresh_model(models / "llama", groups)
    deeper = fresh_model(models / "llama_deeper", groups)
    critic = fresh_model(models / "llama", groups, role=Role.CRITIC)
    messages = {
        "another family": message(lambda: load_weights(llama, checkpoints / "qwen2_tied")),
        "more layers": message(lambda: load_weights(deeper, checkpoints / "llama")),
        "another role": message(lambda: load_weights(critic, checkpoints / "llama")),
        "not a checkpoint": message(lambda: load_weights(llama, models / "llama")),
    }
    for what, folder in damaged.items():
        messages[what] = message(lambda folder=folder: load_weights(llama, folder))
    messages["target exists"] = message(lambda: save_weights(llama, checkpoints / "llama", models / "llama"))
    return messages


def save_on_a_full_disk(models: Path, folder: Path, full_rank: int, limit_bytes: int) -> str:
    """One rank cannot write more than `limit_bytes` into a file."""
    groups = groups_of(tp=2)
    model = fresh_model(models / "llama", groups)
    load_hf(model, models / "llama")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == full_rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        return message(lambda: save_weights(model, folder, models / "llama"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_and_load_in_four(models: Path, single: Path, parallel: Path, names: list[str], full: Path) -> dict:
    """Everything that wants four ranks, in one start of four processes."""
    results = {"of one process": load_in([{"tp": 2, "pp": 2}], models, single, names)}
    save_in({"tp": 2, "pp": 2}, models, parallel, names)
    layouts = [{"pp": 2, "vpp": 2}, {"tp": 4}, {"ep": 2, "etp": 1, "tp": 2, "cp": 2}]
    results["of four"] = load_in(layouts, models, parallel, names)
    results["full disk"] = save_on_a_full_disk(models, full, full_rank=1, limit_bytes=4096)
    return results
