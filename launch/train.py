"""Start a run: `torchrun --nproc-per-node 8 launch/train.py --config grpo.yaml optim.lr=1e-5`.

With `--check` nothing runs: the config is validated and printed, without torch and within half a second.
"""

import argparse
import os
import sys
import textwrap
import time

from megarl.config import ConfigError, RunConfig, load_config, missing_packages, validate
from megarl.config.guard_notes import guard_notes
from megarl.config.show import config_sections, describe_run, key_help, print_text, to_yaml
from megarl.processes.parent import die_with_parent
from megarl.processes.stop_signals import listen

EXIT_BAD_CONFIG = 2
FIRST_SPEAKS_S = 5.0
"""Torchrun ends every rank as soon as one has left: the others wait this long for what the first has to say."""


def main() -> int:
    """Run the command line; returns the exit status: 0, 2 where the config cannot run, 75 where the run was asked to
    stop and goes on when it is started again."""
    arguments = parse_arguments()
    if arguments.help_config is not None:
        print_key_help(arguments.help_config)
        return 0
    try:
        config = load_config(arguments.config, arguments.overrides)
    except ConfigError as error:
        return refuse(error.problems)
    problems = validate(config, arguments.world_size)
    if not arguments.check:
        problems += missing_packages(config)
    if problems:
        return refuse(problems)
    if arguments.check:
        print_check(config, arguments.world_size)
        return 0
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A torchrun that is killed, rather than asked, would leave its ranks behind, with the memory of their GPUs.
        die_with_parent()
    listen(config.trainer.stop_grace_s)
    from megarl.trainers.run import run  # here, since it imports torch

    return run(config)


def parse_arguments() -> argparse.Namespace:
    sections = config_sections()
    parser = argparse.ArgumentParser(
        prog="launch/train.py",
        description="Train a language model with Megatron on the ranks that torchrun starts.",
        epilog="sections of a config:\n" + "\n".join(f"  {section.name:<12}{section.doc}" for section in sections),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; looked for here, then in the checkout's configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.add_argument(
        "--check", action="store_true", help="validate, print the whole config and the layout, and exit"
    )
    parser.add_argument(
        "--world-size",
        type=int,
        # As text, so that argparse checks it as it checks the option.
        default=os.environ.get("WORLD_SIZE", "1"),
        metavar="N",
        help="ranks to check for (default: torchrun's WORLD_SIZE, or 1)",
    )
    parser.add_argument(
        "--help-config",
        nargs="?",
        const="",
        choices=["", *(section.name for section in sections)],
        metavar="SECTION",
        help="print every key with its default and meaning (of one section), and exit",
    )
    arguments = parser.parse_intermixed_args()
    if arguments.help_config is None and arguments.config is None:
        parser.error("--config FILE is needed, e.g. --config gsm8k_smollm2_grpo.yaml")
    return arguments


def print_key_help(section_name: str) -> None:
    """Every key of one section, or of all where the name is empty."""
    text = "\n\n".join(key_help(section) for section in config_sections() if section_name in ("", section.name))
    print_text(text)


def print_check(config: RunConfig, world_size: int) -> None:
    """The whole config as YAML, with what it means for this world size as comments."""
    if not is_first_rank():
        return
    notes = guard_notes(config, config.trainer.total_training_steps)
    facts = [describe_run(config, world_size), *notes, *missing_packages(config)]
    print_text(to_yaml(config) + textwrap.indent("\n".join(facts), "# "))


def refuse(problems: list[str]) -> int:
    """Say what is wrong, once for all ranks."""
    if is_first_rank():
        count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
        print("\n".join([f"{count}:", *(f"- {problem}" for problem in problems)]), file=sys.stderr)
    else:
        time.sleep(FIRST_SPEAKS_S)
    return EXIT_BAD_CONFIG


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
