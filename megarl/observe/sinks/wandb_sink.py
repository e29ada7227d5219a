"""Metrics to Weights & Biases (https://docs.wandb.ai/ref/python/init)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any, cast

import wandb

from megarl.observe.sinks.identity import RunIdentity

_ID, _STEP = "wandb-id", "wandb-step"


class WandbSink:
    """One run in wandb, which a resumed run continues under its id.

    A step that wandb has is not sent again: after a resume, the steps since the checkpoint keep the metrics of the
    process that was ended.
    """

    def __init__(self, identity: RunIdentity, mode: str | None, say: Callable[[str], None]) -> None:
        """Connects, or opens files.

        Args:
            mode: `online`, `offline`, or None for what WANDB_MODE says.
            say: prints one line, about where the run is to be seen.

        Raises:
            RuntimeError: there is no API key.
            wandb.Error: no connection.
        """
        # wandb would ask for the key on a terminal, and wait.
        is_online = (mode or os.environ.get("WANDB_MODE", "online")) == "online"
        if is_online and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("there is no API key: run `wandb login`, or set observe.wandb_mode to offline")
        run_id = identity.kept(_ID) or secrets.token_hex(4)
        identity.keep(_ID, run_id)
        # Online wandb knows itself which steps it has, offline nobody does.
        self._identity, self._last_step = identity, int(identity.kept(_STEP) or -1)
        identity.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=identity.project,
            name=identity.name,
            group=identity.group,
            id=run_id,
            resume="allow",
            config=dict(identity.settings),
            allow_val_change=True,  # a run may be resumed with other settings
            dir=str(identity.folder),
            mode=cast(Any, mode),
            reinit="create_new",  # a reward function may have a run of its own
            settings=wandb.Settings(silent=True, console="off"),  # its lines would tear the progress bar
        )
        say(f"wandb: {self._where()}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._last_step:
            return
        self._run.log(dict(metrics), step=step, commit=True)  # by default a step waits for the next
        self._identity.keep(_STEP, str(step))

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

    def _where(self) -> str:
        if self._run.offline:
            return f"offline; send it with `wandb sync {self._run.sync_dir}`"
        return self._run.url or self._run.id
