"""What outside trackers know a run by."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megarl.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Names, settings and ids of one run."""

    project: str
    name: str
    group: str | None
    folder: Path
    """`trainer.default_local_dir`."""
    settings: Mapping[str, Any]
    """The whole config, nested."""
    is_resumed: bool
    """Whether the run goes on from a checkpoint, and so under the ids that it has."""

    @classmethod
    def of(cls, config: RunConfig, *, is_resumed: bool) -> Self:
        """That of a config."""
        trainer = config.trainer
        return cls(
            project=trainer.project_name,
            name=run_name(config),
            group=trainer.group_name,
            folder=Path(trainer.default_local_dir),
            settings=dataclasses.asdict(config),
            is_resumed=is_resumed,
        )

    def kept(self, name: str) -> str | None:
        """What `keep` was given for the run in an earlier process; None in a run that begins."""
        file = self._file(name)
        return file.read_text(encoding="utf-8").strip() or None if self.is_resumed and file.exists() else None

    def keep(self, name: str, value: str) -> None:
        """Keeps a word for when the run is resumed, e.g. its id in a tracker, in the folder `trackers`."""
        file = self._file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{name}.part")
        part.write_text(value + "\n", encoding="utf-8")
        os.replace(part, file)

    def flat_settings(self) -> Iterator[tuple[str, Any]]:
        """Every key of the config, dotted, with its value."""
        return _flat(self.settings, "")

    def _file(self, name: str) -> Path:
        return self.folder / "trackers" / name


def run_name(config: RunConfig) -> str:
    """`trainer.experiment_name`, or the last part of the run's folder."""
    return config.trainer.experiment_name or Path(config.trainer.default_local_dir).resolve().name


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
