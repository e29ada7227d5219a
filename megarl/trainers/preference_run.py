"""A run of preference optimisation: on pairs as they are, or in rounds that begin with generating them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.algorithms.preference import preference_loss
from megarl.config import ConfigError, RunConfig
from megarl.observe.sinks import run_name
from megarl.parallel.groups import Groups
from megarl.trainers.finish import EXPORT_NAME
from megarl.trainers.kept import model_checksum
from megarl.trainers.preference import train_on_preferences
from megarl.trainers.round_pairs import PAIRS_NAME, generate_pairs, pairs_are_readable
from megarl.trainers.setup import load_plugins_of
from megarl.weights.together import raise_together

_STATE_NAME = "round.json"
"""In a round's folder: what its pairs were generated from, and whether it is over."""


def run_preference(config: RunConfig, groups: Groups) -> None:
    """Trains on preferences to the end of the run. Collective over the world.

    Raises:
        ConfigError: anything that a person has to put right.
    """
    load_plugins_of(config)
    _check_loss(config)
    if not config.preference.rounds:
        train_on_preferences(config, groups)
        return
    start = Path(config.model.path)
    for number in range(1, config.preference.rounds + 1):
        start = _run_round(config, groups, number, start)
        # The round's model and optimizer hold each other; the next round needs their memory.
        gc.collect()
    if groups.rank == 0:
        _point_to(Path(config.trainer.default_local_dir, EXPORT_NAME), start)
    dist.barrier()


def _check_loss(config: RunConfig) -> None:
    name = config.preference.loss_type
    try:
        traits = preference_loss.traits(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if traits.imitates and not config.preference.rounds:
        raise ConfigError(
            f"preference.loss_type {name} learns from the policy's own responses, but preference.rounds is 0: set it "
            "to 1 or more."
        )


def _run_round(config: RunConfig, groups: Groups, number: int, start: Path) -> Path:
    """One round, or what is left of it; returns the folder of the model that it ends with.

    A round is a run of its own in a folder of its own: its reference is the model that it starts from, and an
    interrupted one goes on with the pairs that it has.
    """
    folder = Path(config.trainer.default_local_dir, f"round-{number}")
    of_round = _config_of_round(config, folder, start)
    key = _key(config, number, start) if groups.rank == 0 else ""
    state = _read_state(folder, key, config.trainer.resume_mode)
    if state.get("over"):
        return folder / EXPORT_NAME
    if not state:
        state = {"key": key, "over": False, "note": generate_pairs(of_round, groups, number, folder)}
        _write_state(folder, state)
    data = dataclasses.replace(config.data, train_files=[str(folder / PAIRS_NAME)])
    name = f"{config.preference.loss_type.upper()}, round {number} of {config.preference.rounds}"
    train_on_preferences(dataclasses.replace(of_round, data=data), groups, title=name, notes=[state["note"]])
    _write_state(folder, {**state, "over": True})
    return folder / EXPORT_NAME


def _config_of_round(config: RunConfig, folder: Path, start: Path) -> RunConfig:
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=str(start)),
        trainer=dataclasses.replace(
            config.trainer,
            default_local_dir=str(folder),
            experiment_name=f"{run_name(config)}-{folder.name}",
        ),
    )


def _key(config: RunConfig, number: int, start: Path) -> str:
    """Of what the pairs of a round follow from."""
    data, rollout = config.data, config.rollout
    parts = (
        number,
        # A run's folder may have been copied since, which changes the times of files.
        model_checksum(start, times=False),
        (data.train_files, data.max_prompt_length, data.max_response_length, data.truncation),
        (rollout.n, rollout.temperature, rollout.top_p, rollout.top_k),
        (config.preference.loss_type, config.preference.prompts_per_round, config.preference.win_rate),
        (config.reward.custom.path, config.reward.rule_weight, config.reward.model.path, config.reward.model.weight),
        config.trainer.seed,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read_state(folder: Path, key: str, resume_mode: str) -> dict[str, Any]:
    """What is known of a round that has begun; empty where it has to begin. Collective over the world.

    Raises:
        ConfigError: there is a round in the folder, but of another run.
    """
    found: list[Any] = [{}, None]
    if dist.get_rank() == 0 and resume_mode != "disable":
        with contextlib.suppress(FileNotFoundError, ValueError):  # not begun, or not written to its end
            found[0] = json.loads((folder / _STATE_NAME).read_text(encoding="utf-8"))
        if found[0] and found[0].get("key") != key:
            found[1] = (
                f"{folder} holds a round of another run (other data, sampling, rewards or model): name another "
                "trainer.default_local_dir, or set trainer.resume_mode to disable to begin anew."
            )
        elif found[0]:
            found[0]["over"] = found[0]["over"] and (folder / EXPORT_NAME).is_dir()
            if not found[0]["over"] and not pairs_are_readable(folder / PAIRS_NAME):
                found[0] = {}
    dist.broadcast_object_list(found)
    raise_together(found[1])
    return found[0]


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    """Collective over the world."""
    if dist.get_rank() == 0:
        temporary = folder / f".{_STATE_NAME}.new"
        temporary.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, folder / _STATE_NAME)
    dist.barrier()


def _point_to(link: Path, folder: Path) -> None:
    """Makes `link` a relative symbolic link to `folder`; what was there is replaced."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(folder, link.parent), target_is_directory=True)
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    os.replace(temporary, link)
