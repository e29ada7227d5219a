"""What a teacher's scores are computed from, and when, in a process of its own."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import platform

platform.current()  # prepares Megatron-Core before anything imports it
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

from megarl.config import ConfigError, RunConfig, load_config  # noqa: E402
from megarl.config.layout import Layout  # noqa: E402
from megarl.data.chat import load_chat_tokenizer  # noqa: E402
from megarl.data.pairs import PairDataset  # noqa: E402
from megarl.parallel.groups import build_groups  # noqa: E402
from megarl.trainers import teacher  # noqa: E402


def when_the_teacher_is_asked(config_path: Path) -> dict[str, bool]:
    """Whether the teacher was loaded, in several situations one after another."""
    groups = build_groups(Layout(world_size=dist.get_world_size()))
    config = load_config(config_path, [])
    loaded: list[str] = []
    load_model = teacher.load_model

    def counted(*arguments: object, **settings: object) -> object:
        loaded.append(str(settings["path"]))
        return load_model(*arguments, **settings)  # type: ignore[arg-type]

    teacher.load_model = counted  # type: ignore[assignment]

    def asked(**changes: object) -> bool:
        loaded.clear()
        for key, value in changes.items():
            setattr(config.data, key, value)
        scores(config, groups)
        return bool(loaded)

    kept = Path(config.trainer.default_local_dir, "teacher-scores-train.safetensors")
    weights = Path(str(config.reward_model.teacher), "model.safetensors")
    found = {"at first": asked(), "again": asked()}
    rewrite(weights, lambda content: content)
    found["after its weights were written anew"] = asked()
    found["with other data"] = asked(train_files=config.data.val_files)
    rewrite(kept, lambda content: content[:-8])
    found["after the file was damaged"] = asked()
    found["at last"] = asked()
    return found


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    """Writes a file anew on one rank, while no other reads it."""
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(change(file.read_bytes()))
    dist.barrier()


def scores(config: RunConfig, groups: object) -> torch.Tensor:
    chat = load_chat_tokenizer(config.model.path)
    data = PairDataset(config.data.train_files, chat, config.data)
    return teacher.teacher_scores(config, groups, "train", data, chat)  # type: ignore[arg-type]


def refusals(config_path: Path) -> dict[str, str]:
    """What is said about teachers that read other tokens."""
    groups = build_groups(Layout(world_size=dist.get_world_size()))
    config = load_config(config_path, [])
    folder = Path(str(config.reward_model.teacher))
    messages = {}
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<s>"))
    messages["another chat template"] = _refusal(config, groups)
    tokenizer = folder / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer.write_text(json.dumps(content))
    messages["another vocabulary"] = _refusal(config, groups)
    return messages


def _refusal(config: RunConfig, groups: object) -> str:
    try:
        scores(config, groups)
    except ConfigError as error:
        return str(error)
    return "nothing was wrong"
