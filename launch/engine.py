"""Start an engine on GPUs of its own: `python launch/engine.py --config grpo.yaml --server 0`.

It is one of the config's `rollout.servers`: it takes `rollout.tensor_model_parallel_size` GPUs of this machine, listens
on the port that is named there, and serves one run after the other until it is ended. Config and overrides are those of
the run.
"""

import argparse
import json
import os
import sys
from importlib.util import find_spec

from megarl.config import ConfigError, RunConfig, load_config
from megarl.config.server_rules import parse_address
from megarl.config.validate import validate_server

PROGRAM = "megarl.rollout.sglang.listener"
EXIT_BAD_CONFIG = 2


def main() -> int:
    """Run the command line; returns the exit status where the engine cannot start: 2."""
    arguments = parse_arguments()
    try:
        config = load_config(arguments.config, arguments.overrides)
        check(config, arguments)
        start(config, arguments)
    except ConfigError as error:
        print("\n".join(["cannot start:", *(f"- {problem}" for problem in error.problems)]), file=sys.stderr)
    return EXIT_BAD_CONFIG


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch/engine.py", description="Start one of a run's rollout.servers.")
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file, as for launch/train.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.add_argument(
        "--server", type=int, default=0, metavar="N", help="which of rollout.servers, from 0 (default: 0)"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="nodes of this engine (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="N", help="which of them this is, from 0")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where its nodes meet: an address of the first of them")
    return parser.parse_intermixed_args()


def check(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Looks at what this engine needs of the config; the run itself looks at all of it.

    Raises:
        ConfigError: it cannot start.
    """
    count = len(config.rollout.servers)
    problems = validate_server(config)
    if count and not 0 <= arguments.server < count:
        problems.append(f"--server is {arguments.server}, but rollout.servers names {count}, counted from 0.")
    if not 0 <= arguments.node_rank < arguments.nnodes:
        problems.append(f"--node-rank is {arguments.node_rank}, but --nnodes is {arguments.nnodes}, counted from 0.")
    if arguments.nnodes > 1 and (arguments.rdzv is None or not _is_address(arguments.rdzv)):
        problems.append("--nnodes is above 1: name with --rdzv host:port where the engine's nodes meet.")
    if find_spec("sglang") is None:
        problems.append(
            "SGLang is not installed: pip install -e '.[sglang]' on a machine with CUDA, or source "
            "launch/setup_sglang_cpu.sh on another."
        )
    if problems:
        raise ConfigError(problems)


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except ValueError:
        return False
    return True


def start(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Becomes the engine's program, in an environment that is set before anything is imported.

    Raises:
        ConfigError: its size and that of its nodes do not fit.
    """
    import torch  # here, since it takes seconds

    from megarl.rollout.sglang.environment import server_environment
    from megarl.rollout.sglang.facts import engine_facts
    from megarl.rollout.sglang.options import engine_arguments, engine_settings
    from megarl.rollout.sglang.placement import place_server

    size, on_cpu = config.rollout.tensor_model_parallel_size, not torch.cuda.is_available()
    try:
        placement = place_server(arguments.server, size, arguments.nnodes, arguments.node_rank)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    settings = engine_settings(config)
    facts = engine_facts(settings, size, backend="gloo" if on_cpu else "nccl")
    of_sglang = engine_arguments(settings, placement, on_cpu=on_cpu, address=arguments.rdzv, gives_memory_back=False)
    _, port = parse_address(config.rollout.servers[arguments.server])
    cores = sorted(os.sched_getaffinity(0))
    environment = server_environment(os.environ, placement, on_cpu=on_cpu, cores=cores)
    program = [sys.executable, "-m", PROGRAM, str(port), json.dumps(facts), json.dumps(of_sglang)]
    os.execve(sys.executable, program, environment)


if __name__ == "__main__":
    sys.exit(main())
