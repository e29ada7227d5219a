"""A run that is asked to stop ends after a step, with a checkpoint, and with a status that says: start it again."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist

from megarl import platform
from megarl.processes.stop_signals import begin_steps, stop_request


class Preempted(Exception):
    """The run was asked to stop, and has saved what it could."""

    def __init__(self, step: int, request: signal.Signals, saved: int) -> None:
        """Args:
        saved: the step of the newest checkpoint, which is an earlier one where the last save failed.
        """
        place = "from there" if saved == step else f"after step {saved}, since no later one is saved"
        super().__init__(f"stopped after step {step} on {request.name}; the same command goes on {place}")


def agreed_request() -> signal.Signals | None:
    """What any rank was asked, the same on every rank. Collective over the world.

    Signals reach ranks at different moments: without agreement one would save while another begins the next step.
    """
    request = torch.tensor([float(stop_request() or 0)], device=platform.current().device)
    dist.all_reduce(request, dist.ReduceOp.MAX)
    number = int(request.item())
    return signal.Signals(number) if number else None


def stop_before_first_step(step: int) -> None:
    """To be called before the loop, which goes on after `step`. Collective over the world.

    Raises:
        Preempted: somebody has asked already.
    """
    begin_steps()
    if request := agreed_request():
        raise Preempted(step, request, step)
