"""What the converters share: the layout's flags, progress, and how they fail. Imports no torch when it is loaded."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megarl.config import layout as layout_keys
from megarl.config.errors import ConfigError
from megarl.config.layout import Layout
from megarl.config.model_shape import ModelShape
from megarl.processes.parent import die_with_parent

# Read when torch is loaded. OpenMP threads that wait actively made a copy ten times slower where other processes
# wanted the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

EXIT_BAD_INPUT = 2
EXIT_NOT_VERIFIED = 3

COLLECTIVE_TIMEOUT_S = 3600.0
"""Ranks wait for rank 0 while it hashes a model, or runs it in transformers. A rank that dies ends them at once."""

_GRACE_S = 20.0
"""How long the other ranks leave rank 0 to say what was wrong: torchrun ends all once one has left."""

_PLAIN_STEP_S = 5.0
"""How often a log gets a line, in seconds."""

_DEFAULT_SHARD_SIZE = "5GB"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}

_LAYOUT_FLAGS = {
    layout_keys.TP_KEY: ("--tp", "tensor parallel: ranks that share each matrix"),
    layout_keys.PP_KEY: ("--pp", "pipeline parallel: stages that share the layers"),
    layout_keys.VPP_KEY: ("--vpp", "virtual pipeline: model chunks on each stage"),
    layout_keys.CP_KEY: ("--cp", "context parallel: ranks that share each sequence"),
    layout_keys.EP_KEY: ("--ep", "expert parallel: ranks that share the experts"),
    layout_keys.ETP_KEY: ("--etp", "expert tensor parallel: ranks that share each expert (default: --tp)"),
    layout_keys.FIRST_STAGE_KEY: ("--first-stage-layers", "layers on the first stage, where stages are uneven"),
    layout_keys.LAST_STAGE_KEY: ("--last-stage-layers", "layers on the last stage, where stages are uneven"),
}


class Parser(argparse.ArgumentParser):
    """Under torchrun, one rank speaks for all."""

    def _print_message(self, message: str, file: object = None) -> None:
        if is_first_rank():
            super()._print_message(message, file)  # type: ignore[arg-type]

    def exit(self, status: int = 0, message: str | None = None) -> None:  # type: ignore[override]
        if message:
            self._print_message(message, sys.stderr)
        leave(status)


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout", "of the ranks that convert; the checkpoint loads in any other")
    for flag, text in _LAYOUT_FLAGS.values():
        optional = flag in ("--etp", "--first-stage-layers", "--last-stage-layers")
        group.add_argument(flag, type=int, default=None if optional else 1, metavar="N", help=text)


def add_shard_size_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=_DEFAULT_SHARD_SIZE,
        metavar="SIZE",
        help="of tensors in one file, such as 500MB; a killed conversion goes on after the last whole file of each "
        f"rank (default: {_DEFAULT_SHARD_SIZE}, as in transformers)",
    )


def parse_size(text: str) -> int:
    """Bytes, of `5GB` and the like, in powers of ten as transformers has them.

    Raises:
        ArgumentTypeError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write a number with KB, MB or GB, such as 5GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def add_verify_argument(parser: argparse.ArgumentParser, how: str) -> None:
    """Adds --verify.

    Args:
        how: the help's words for how tensors are compared.
    """
    parser.add_argument(
        "--verify",
        nargs="?",
        choices=["all", "tensors"],
        const="all",
        metavar="tensors",
        help=f"prove the result: {how} bit for bit, and the logits with transformers, for which rank 0 holds the whole "
        "model in float32; `--verify tensors` leaves the logits out. Writes verify.json into the result",
    )


def layout_of(arguments: argparse.Namespace, hf: Path) -> Layout:
    """The layout of the flags, for torchrun's ranks or the one process.

    Raises:
        ConfigError: every reason why the model in `hf` cannot be laid out so.
    """
    layout = Layout(
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        tp=arguments.tp,
        pp=arguments.pp,
        vpp=arguments.vpp,
        cp=arguments.cp,
        ep=arguments.ep,
        etp=arguments.etp,
        first_stage_layers=arguments.first_stage_layers,
        last_stage_layers=arguments.last_stage_layers,
    )
    problems = layout.problems(ModelShape.from_hf(hf))
    if problems:
        raise ConfigError([_with_flags(problem) for problem in problems])
    return layout


def _with_flags(problem: str) -> str:
    """A sentence about config keys, as one about this program's flags."""
    for key, (flag, _) in _LAYOUT_FLAGS.items():
        problem = problem.replace(key, flag)
    return problem


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """One line on stdout, from rank 0."""
    if is_first_rank():
        print(text, flush=True)


def run(convert: Callable[[], int]) -> None:
    """Runs a converter and ends the process: a person's mistake is a sentence on stderr, from rank 0."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # what libraries warn their developers of is not about this conversion
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A torchrun that is killed, rather than asked, would leave its ranks behind, which go on writing.
        die_with_parent()
    try:
        status = convert()
    except ConfigError as error:
        refuse(error.problems)
        status = EXIT_BAD_INPUT
    except OSError as error:
        if error.errno is None or error.filename is None:
            raise  # no file that could not be read or written, but a fault in the program or the network
        refuse([f"cannot read or write {error.filename}: {error.strerror}"])
        status = EXIT_BAD_INPUT
    leave(status)


def refuse(problems: Sequence[str]) -> None:
    """Says what is wrong, once for all ranks."""
    if not is_first_rank():
        return
    lines = problems if len(problems) == 1 else [f"{len(problems)} problems:", *(f"- {text}" for text in problems)]
    print("\n".join(lines), file=sys.stderr, flush=True)


def leave(status: int) -> None:
    """Ends this rank; after a failure, not before rank 0 could speak."""
    if status != 0 and not is_first_rank():
        time.sleep(_GRACE_S)
    sys.exit(status)


@contextlib.contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows how much is done: a bar on a terminal, a few lines elsewhere, and nothing on ranks other than 0.

    Args:
        total_bytes: what the numbers given to the function that this yields add up to.
    """
    if not is_first_rank():
        yield lambda num_bytes: None
        return
    if sys.stdout.isatty():
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns) as bars:
            task = bars.add_task(title, total=total_bytes)
            yield lambda num_bytes: bars.advance(task, num_bytes)
        return
    lines = _PlainProgress(title, total_bytes)
    yield lines.advance
    lines.finish()


class _PlainProgress:
    """A line now and then for a log file, and one at the end."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title, self._total, self._done = title, total_bytes, 0
        self._start = self._last = time.monotonic()

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.monotonic()
        if now - self._last >= _PLAIN_STEP_S:
            self._last = now
            say(f"{self._title}: {self._done / self._total:.0%} of {self._total / 1e6:,.1f} MB")

    def finish(self) -> None:
        seconds = time.monotonic() - self._start
        say(f"{self._title}: {self._done / 1e6:,.1f} MB in {seconds:.1f} s")
