"""The one error that a person's mistake in a config raises."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """Everything that is wrong with a config, as a report for the person who wrote it.

    Attributes:
        problems: one sentence per problem: what is wrong, where (file, key), what would do.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
