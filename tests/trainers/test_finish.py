"""The export at the end of a run, where the disk is full by then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config import ConfigError, RunConfig
from megarl.trainers import finish

FULL = "cannot read or write {folder}/model.safetensors: No space left on device"


@contextlib.contextmanager
def full_disk(target: Path) -> Iterator[Path]:
    raise ConfigError(FULL.format(folder=target))
    yield target


@pytest.mark.parametrize(
    ("save_freq", "then"),
    [(20, "goes on at the newest checkpoint and exports it."), (-1, "trains it anew (trainer.save_freq was not set).")],
)
def test_an_export_that_fails_says_what_is_left_of_the_run(
    save_freq: int, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig()
    config.trainer.default_local_dir, config.trainer.save_freq = str(tmp_path), save_freq
    monkeypatch.setattr(finish, "publish", full_disk)
    monkeypatch.setattr(finish.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(finish.dist, "barrier", lambda: None)
    with pytest.raises(ConfigError) as caught:
        finish.export_final(None, config)
    assert str(caught.value) == (
        f"the trained model was not exported to {tmp_path}/hf: {FULL.format(folder=f'{tmp_path}/hf-new')}. "
        f"Put that right; the same command then {then}"
    )
