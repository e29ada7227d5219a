"""Generated sums to parquet, for models that are too small for anything else:

    python tools/data/arithmetic.py --terms 2 --digits 1 --size 80 --held-out-size 20 \\
        --out data/sums/train.parquet --held-out data/sums/test.parquet

The question is `3 + 4 =`, the ground truth `7`, graded by exact match.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

from rows import QUESTION, add_generator_options, add_prompt_options, fill_template, run, verl_row, write_generated

from megarl.config.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate sums, and write them to parquet in verl's columns.")
    parser.add_argument("--terms", type=int, default=2, metavar="N", help="numbers in each sum (default: 2)")
    parser.add_argument("--digits", type=int, default=1, metavar="N", help="digits of a number, at most (default: 1)")
    parser.add_argument("--operators", default="+", metavar="OPS", help="signs to draw from: +, - or +- (default: +)")
    add_generator_options(parser)
    add_prompt_options(parser, QUESTION)
    options = parser.parse_args()
    if options.terms < 2 or options.digits < 1 or not options.operators or set(options.operators) - set("+-"):
        raise ConfigError(
            f"--terms {options.terms} --digits {options.digits} --operators '{options.operators}': a sum has at least "
            "2 terms of at least 1 digit, and signs from + and -."
        )

    def to_row(question: str, total: int, number: int) -> dict[str, Any]:
        return verl_row(
            data_source="arithmetic",
            question=fill_template(options.template, question),
            system=options.system,
            style="exact_match",
            ground_truth=str(total),
            extra_info={"index": number, "question": question},
        )

    write_generated(options, draw_sums(options.terms, options.digits, options.operators, options.seed), to_row)


def draw_sums(terms: int, digits: int, operators: str, seed: int) -> Iterator[tuple[str, int]]:
    """Endless (question, total), the numbers uniform from 0 to 10^digits − 1."""
    generator = random.Random(seed)
    while True:
        total = generator.randrange(10**digits)
        question = str(total)
        for _ in range(terms - 1):
            sign, number = generator.choice(operators), generator.randrange(10**digits)
            question += f" {sign} {number}"
            total += number if sign == "+" else -number
        yield f"{question} =", total


if __name__ == "__main__":
    run(main)
