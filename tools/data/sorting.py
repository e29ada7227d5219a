"""Digits to sort, to parquet, with demonstrations that are half wrong, for models that are too small for anything else:

    python tools/data/sorting.py --digits 4 --size 4000 --out data/sorting/train.parquet
    python tools/data/sorting.py --digits 4 --size 4000 --demonstrations --out data/sorting/sft.parquet
    python tools/data/sorting.py --digits 4 --size 4000 --pairs --out data/sorting/pairs.parquet

The question is `3142`, the ground truth `1234`, graded by exact match. With `--demonstrations` the rows are
conversations for supervised fine-tuning instead. As in data that was collected and not made, not all of them are right:
a share (`--wrong-share`) sorts in descending order. A model that imitates them does both, and reinforcement learning
has to find out which of the two is wanted. With `--pairs` the rows are for reward models: the right answer is
preferred to one in descending order, in no order, or with another digit. All forms have the same questions for the same
`--seed` and sizes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

from rows import QUESTION, add_generator_options, add_prompt_options, fill_template, run, verl_row, write_generated

from megarl.config.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate digits to sort, and write them to parquet.")
    parser.add_argument("--digits", type=int, default=4, metavar="N", help="digits of each question (default: 4)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--demonstrations", action="store_true", help="write conversations for SFT (column: messages)")
    form.add_argument(
        "--pairs", action="store_true", help="write preferences for reward models (columns: prompt, chosen, rejected)"
    )
    parser.add_argument(
        "--wrong-share",
        type=float,
        default=0.6,
        metavar="P",
        help="of the demonstrations, those that sort in descending order (default: 0.6)",
    )
    add_generator_options(parser)
    add_prompt_options(parser, QUESTION)
    options = parser.parse_args()
    if options.digits < 2:
        raise ConfigError(f"--digits {options.digits}: it takes at least 2 digits to sort.")
    if not 0 <= options.wrong_share <= 1:
        raise ConfigError(f"--wrong-share {options.wrong_share} is no share: give a number from 0 to 1.")

    def to_row(digits: str, is_wrong: bool, number: int) -> dict[str, Any]:
        prompt = verl_row(
            data_source="sorting",
            question=fill_template(options.template, digits),
            system=options.system,
            style="exact_match",
            ground_truth="".join(sorted(digits)),
            extra_info={"index": number, "question": digits},
        )
        if options.pairs:
            rejected = wrong_answer(digits, random.Random(f"{options.seed} {number}"))
            return {"prompt": prompt["prompt"], "chosen": "".join(sorted(digits)), "rejected": rejected}
        if not options.demonstrations:
            return prompt
        answer = "".join(sorted(digits, reverse=is_wrong))
        return {"messages": [*prompt["prompt"], {"role": "assistant", "content": answer}]}

    write_generated(options, draw_digits(options.digits, options.wrong_share, options.seed), to_row)


def draw_digits(count: int, wrong_share: float, seed: int) -> Iterator[tuple[str, bool]]:
    """Endless (digits, whether its demonstration is a wrong one), each digit uniform from 0 to 9."""
    generator = random.Random(seed)
    while True:
        digits = "".join(generator.choices("0123456789", k=count))
        yield digits, generator.random() < wrong_share


def wrong_answer(digits: str, generator: random.Random) -> str:
    """Digits that are not `digits` in ascending order: each of three kinds as often, where there is such an answer."""
    right = sorted(digits)
    changed = list(right)
    changed[generator.randrange(len(changed))] = generator.choice("0123456789")
    answers = [right[::-1], generator.sample(right, len(right)), changed]
    generator.shuffle(answers)
    wrong = [answer for answer in answers if answer != right]
    return "".join(wrong[0]) if wrong else wrong_answer(digits, generator)


if __name__ == "__main__":
    run(main)
