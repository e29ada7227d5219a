"""Prove a run before it costs a GPU: `python launch/plan.py --config 70b_grpo.yaml --gpus 64 --gpu-memory 80`.

Needs the model's config.json; no weights and no GPU. With `--search`, other layouts are tried too. Only the weight map
needs torch: a process of its own builds the modules of every rank without memory. `--no-map` leaves it out.
"""

import argparse
import dataclasses
import json
import sys

from option_types import positive

from megarl.config import ConfigError, RunConfig, load_config
from megarl.config.show import print_text
from megarl.planning.hardware import GPUS
from megarl.planning.memory import GIB
from megarl.planning.plan import Plan, Request, make_plan
from megarl.planning.step_time import Lengths

GB = 10**9
EXIT_CANNOT_WORK = 1
EXIT_BAD_CONFIG = 2


def main() -> int:
    """Run the command line; returns the exit status: 0, 1 if the run cannot work, 2 if the config cannot be read."""
    arguments = parse_arguments()
    try:
        config = load_config(arguments.config, arguments.overrides)
        lengths = mean_lengths(arguments, config)
    except ConfigError as error:
        return show(Plan(problems=error.problems), arguments, EXIT_BAD_CONFIG)
    gpu = GPUS[arguments.gpu]
    if arguments.network_gb:
        gpu = dataclasses.replace(gpu, network=arguments.network_gb * GB)
    plan = make_plan(
        Request(
            config=config,
            world_size=arguments.gpus,
            gpu=gpu,
            limit=(arguments.gpu_memory or gpu.memory_gib) * GIB,
            lengths=lengths,
            searches=arguments.search,
            maps_weights=not arguments.no_map,
        )
    )
    return show(plan, arguments, EXIT_CANNOT_WORK if plan.problems else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/plan.py", description="Say whether a run fits, how its batches fall, and how long a step takes."
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file, as for launch/train.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.add_argument("--gpus", type=positive(int), required=True, metavar="N", help="GPUs of the whole run")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100", help="their kind (default: h100)")
    parser.add_argument(
        "--gpu-memory", type=positive(float), metavar="GIB", help="memory of one GPU (default: that of its kind)"
    )
    parser.add_argument(
        "--mean-prompt", type=positive(float), metavar="TOKENS", help="mean prompt (default: half of the limit)"
    )
    parser.add_argument(
        "--mean-response", type=positive(float), metavar="TOKENS", help="mean response (default: half of the limit)"
    )
    parser.add_argument(
        "--network-gb", type=positive(float), metavar="GB/S", help="to other nodes, for each GPU (default: of its kind)"
    )
    parser.add_argument("--no-map", action="store_true", help="do not build the ranks' modules to prove the weight map")
    parser.add_argument("--search", action="store_true", help="also try other layouts, and show the best that fit")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    return parser.parse_intermixed_args()


def mean_lengths(arguments: argparse.Namespace, config: RunConfig) -> Lengths:
    """Those that were asked for, or half of the config's limits.

    Raises:
        ConfigError: a mean above its limit.
    """
    given = {"prompt": arguments.mean_prompt, "response": arguments.mean_response}
    limits = {name: getattr(config.data, f"max_{name}_length") for name in given}
    if over := [
        f"--mean-{name} is {mean:g} tokens, but data.max_{name}_length is {limits[name]}: no mean is above its limit."
        for name, mean in given.items()
        if mean is not None and mean > limits[name]
    ]:
        raise ConfigError(over)
    usual = Lengths.half_of_limits(config)
    return Lengths(prompt=given["prompt"] or usual.prompt, response=given["response"] or usual.response)


def show(plan: Plan, arguments: argparse.Namespace, status: int) -> int:
    """Prints the plan and returns `status`."""
    if arguments.json:
        print_text(json.dumps(plan.as_json(), indent=2))
        return status
    lines = []
    for section in plan.sections:
        lines += [section.title, *(f"  {line}" if line else "" for line in section.lines), ""]
    lines += [f"not on this machine: {note}" for note in plan.notes]
    if plan.sections and not plan.problems:
        lines.append(f"The run can work on {arguments.gpus} GPUs.")
    if lines:
        print_text("\n".join(lines))
    if plan.problems:
        print("\n".join(["cannot work:", *(f"- {problem}" for problem in plan.problems)]), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
