"""Put a run into Slurm's queue: `python launch/submit.py --config 70b_grpo.yaml --nodes 32 [key=value …]`.

Asks the preflight (`launch/plan.py`) first, and submits nothing that cannot run. `--dry-run` prints the batch script,
which is launch/slurm/train.sbatch with its settings filled in. What is printed on stdout is the job's number alone.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

from batch_script import option_of, render, seconds_of
from option_types import positive, whole

from megarl.config import ConfigError, RunConfig, load_config, validate
from megarl.planning.hardware import GPUS
from megarl.planning.memory import GIB
from megarl.planning.plan import Plan, Request, make_plan
from megarl.planning.step_time import UNCERTAINTY, Lengths

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = "train.sbatch"
NO_GPU = "none"
LONGEST_LEAD_S = 65_535
"""Of sbatch's option --signal."""
OWN_OPTIONS = {
    "job-name": "--job-name",
    "nodes": "--nodes",
    "gpus-per-node": "--gpus-per-node",
    "signal": "--stop-seconds",
    "partition": "--partition",
    "account": "--account",
    "time": "--time",
}
"""Options of sbatch that submit.py sets, and its own for each."""

EXIT_CANNOT_WORK = 1
EXIT_BAD_CONFIG = 2


def main() -> int:
    """Run the command line; returns the exit status: 0, 1 if the run cannot work or Slurm does not take it, 2 if the
    config cannot be read."""
    arguments = parse_arguments()
    try:
        config = load_config(arguments.config, arguments.overrides)
    except ConfigError as error:
        return refuse(error.problems, EXIT_BAD_CONFIG)
    plan = preflight(config, arguments)
    problems = [*plan.problems, *time_problems(arguments), *option_problems(arguments)]
    if not (arguments.dry_run or arguments.container_image):
        # They are missing where the job will look for them; a container sees other folders.
        problems += plan.notes
    if problems:
        return refuse(problems, EXIT_CANNOT_WORK)
    script = batch_script(arguments)
    for line in advice(config, plan, arguments):
        print(line, file=sys.stderr)
    if arguments.dry_run:
        print(script, end="")
        return 0
    return submit(script)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/submit.py", description="Ask the preflight about a run, and put it into Slurm's queue."
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file, as for launch/train.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.add_argument("--nodes", type=whole(1), default=1, metavar="N", help="nodes (default: 1)")
    parser.add_argument(
        "--gpus-per-node", type=whole(1), default=8, metavar="N", help="GPUs, and so ranks, of a node (default: 8)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
    slurm = parser.add_argument_group("Slurm")
    slurm.add_argument("--partition", metavar="NAME", help="partition (default: the cluster's)")
    slurm.add_argument("--account", metavar="NAME", help="account (default: the user's)")
    slurm.add_argument("--time", metavar="LIMIT", help="time limit, e.g. 2-00:00:00 (default: the template's)")
    slurm.add_argument("--job-name", metavar="NAME", help="name of the job (default: that of the config)")
    slurm.add_argument(
        "--sbatch", action="append", default=[], metavar="NAME[=VALUE]", help="another option of sbatch, e.g. qos=high"
    )
    slurm.add_argument(
        "--stop-seconds",
        type=whole(1, LONGEST_LEAD_S),
        default=600,
        metavar="N",
        help="seconds before the end in which the run saves itself; longer than a step (default: %(default)s)",
    )
    slurm.add_argument(
        "--max-requeues",
        type=whole(0),
        default=20,
        metavar="N",
        help="times that it goes back into the queue (default: 20)",
    )
    software = parser.add_argument_group("software on the nodes")
    software.add_argument("--venv", metavar="DIR", help="Python environment (default: .venv of this checkout)")
    software.add_argument("--container-image", metavar="IMAGE", help="image for pyxis")
    software.add_argument("--container-mounts", metavar="LIST", help="e.g. /data:/data; checkout and this folder are")
    plan = parser.add_argument_group("preflight")
    plan.add_argument(
        "--gpu",
        choices=[*sorted(GPUS), NO_GPU],
        default="h100",
        help="kind of the GPUs (default: h100); none: the ranks run on CPUs, and only the config is checked",
    )
    plan.add_argument(
        "--gpu-memory", type=positive(float), metavar="GIB", help="memory of one (default: that of its kind)"
    )
    plan.add_argument("--no-preflight", action="store_true", help="submit what the preflight would refuse")
    return parser.parse_intermixed_args()


def preflight(config: RunConfig, arguments: argparse.Namespace) -> Plan:
    """What launch/plan.py says, without the weight map, which takes up to minutes."""
    if arguments.no_preflight:
        return Plan()
    world_size = arguments.nodes * arguments.gpus_per_node
    if arguments.gpu == NO_GPU:
        return Plan(problems=validate(config, world_size))
    gpu = GPUS[arguments.gpu]
    return make_plan(
        Request(
            config=config,
            world_size=world_size,
            gpu=gpu,
            limit=(arguments.gpu_memory or gpu.memory_gib) * GIB,
            lengths=Lengths.half_of_limits(config),
        )
    )


def time_problems(arguments: argparse.Namespace) -> Iterator[str]:
    """A limit that Slurm would take, but that ends the run as it begins."""
    limit = arguments.time if arguments.time is not None else option_of(TEMPLATE, "time") or "infinite"
    try:
        seconds = seconds_of(limit)
    except ValueError as error:
        yield f"--time {error}."
        return
    if seconds <= arguments.stop_seconds:
        yield (
            f"--time {limit} is no longer than --stop-seconds {arguments.stop_seconds}, so the run would be asked to "
            "stop as soon as it starts: make one longer or the other shorter."
        )


def option_problems(arguments: argparse.Namespace) -> Iterator[str]:
    """Options whose values would make another script than the one that was checked."""
    for name in (option_name(option) for option in arguments.sbatch):
        if name in OWN_OPTIONS:
            yield f"--sbatch {name}: give it as {OWN_OPTIONS[name]} of submit.py, which checks it."
        if name == "array":
            yield (
                "--sbatch array: all runs would write into one folder; launch/slurm/sweep.sbatch is for arrays, and "
                "says how."
            )
    for name, value in sbatch_options(arguments).items():
        if value is not None and "\n" in value:
            yield f"{name} {value!r} has a line break, which no option of sbatch can have in a batch script."
    if arguments.venv is not None and not arguments.container_image:
        activate = Path(arguments.venv, "bin", "activate")
        if not activate.is_file():
            yield f"--venv {arguments.venv} is no Python environment on this machine: {activate} does not exist."


def option_name(option: str) -> str:
    """The long name in what `--sbatch` was given."""
    return option.lstrip("-").partition("=")[0]


def batch_script(arguments: argparse.Namespace) -> str:
    """The template, filled in."""
    settings = {
        "CONFIG": arguments.config,
        "RANKS_PER_NODE": str(arguments.gpus_per_node),
        "MEGARL_ROOT": str(ROOT),
        "STOP_TIMEOUT_S": str(arguments.stop_seconds),
        "MAX_REQUEUES": str(arguments.max_requeues),
    }
    software = {
        "VENV": arguments.venv,
        "CONTAINER_IMAGE": arguments.container_image,
        "CONTAINER_MOUNTS": arguments.container_mounts,
    }
    settings |= {name: value for name, value in software.items() if value is not None}
    return render(TEMPLATE, sbatch_options(arguments), settings, arguments.overrides)


def sbatch_options(arguments: argparse.Namespace) -> dict[str, str | None]:
    """What is set in the template's head, by long names; the value None removes an option."""
    options = {
        "job-name": arguments.job_name or Path(arguments.config).stem,
        "nodes": str(arguments.nodes),
        "gpus-per-node": None if arguments.gpu == NO_GPU else str(arguments.gpus_per_node),
        "signal": f"B:USR1@{arguments.stop_seconds}",
    }
    named = ("partition", "account", "time")
    options |= {name: getattr(arguments, name) for name in named if getattr(arguments, name) is not None}
    for option in arguments.sbatch:
        options[option_name(option)] = option.partition("=")[2]
    return options


def advice(config: RunConfig, plan: Plan, arguments: argparse.Namespace) -> Iterator[str]:
    """What a person should know, though nothing forbids it."""
    answers = plan.as_json()
    if "memory" in answers and "time" in answers:
        peak = max(stage["peak"] for stage in answers["memory"]["stages"])
        limit, step = answers["memory"]["limit"], answers["time"]["step_s"]
        yield f"preflight: {peak / GIB:.0f} of {limit / GIB:.0f} GiB on the worst rank; a step takes about {step:.0f} s"
        if step * UNCERTAINTY > arguments.stop_seconds:
            yield (
                f"note: the estimate of a step is good within a factor of {UNCERTAINTY:g}, so --stop-seconds "
                f"{arguments.stop_seconds} may be too few to end a step and save after it."
            )
    yield from (f"not on this machine: {note}" for note in plan.notes)
    if config.trainer.save_freq < 1:
        yield (
            f"note: trainer.save_freq is {config.trainer.save_freq}, so the failure of a node loses the whole run; set "
            "it, e.g. to 20."
        )


def submit(script: str) -> int:
    """Hands the script to sbatch and prints the job's number."""
    if which("sbatch") is None:
        return refuse(["sbatch is not on this machine: submit from a login node, or see --dry-run."], EXIT_CANNOT_WORK)
    result = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    print(result.stderr, end="", file=sys.stderr)
    if result.returncode != 0:
        return refuse(["Slurm did not take the job (see above)."], EXIT_CANNOT_WORK)
    print(result.stdout.strip().split(";")[0])  # the name of the cluster follows, where there are several
    return 0


def refuse(problems: list[str], status: int) -> int:
    """Says why nothing is submitted."""
    print("\n".join(["not submitted:", *(f"- {problem}" for problem in problems)]), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
