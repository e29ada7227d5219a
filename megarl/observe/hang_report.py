"""Which ranks a run that hangs is waiting for, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.observe.rank_record import RankRecord, name_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a rank says when it is asked where it is."""

    record: RankRecord
    stacks: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """All that is known of a run that hangs."""

    finder: Answer
    """The rank that waited longer than it should, and asked the others."""
    answers: Sequence[Answer]
    """Of the ranks that answered, its own too."""
    silent: Sequence[RankRecord]
    """What those that did not answer said last."""
    unknown: Sequence[int] = ()
    """Ranks that have never said anything."""

    @property
    def absent(self) -> list[RankRecord]:
        """Ranks that answered and wait for nobody."""
        return [answer.record for answer in self.answers if answer.record.waited_s is None]

    def sentence(self) -> str:
        """Who waits and for whom, in one sentence."""
        finder = self.finder.record
        text = f"the run hangs: rank {finder.rank} has waited {finder.waited_s:.0f} s in {finder.call()}"
        return f"{text}, in {finder.place()}; {self.blame()}"

    def blame(self) -> str:
        """The ranks that are missing."""
        silent = [
            f"{record.process()} does not answer, and was last seen in {record.place()}" for record in self.silent
        ]
        if self.unknown:
            silent.append(f"{name_ranks(self.unknown)} never said anything")
        # A busy rank may be waited for by nobody: it is to blame only where every rank has answered.
        parts = silent or [f"{record.process()} is not there, but in {record.place()}" for record in self.absent]
        if not parts:
            return "every rank waits, but not all in the same collective"
        more = [f"and {len(parts) - _SOME} more"] if len(parts) > _SOME else []
        return "; ".join([*parts[:_SOME], *more])

    def report(self) -> str:
        """Everything, for a file."""
        sections = [self.sentence() + "."]
        if self.silent:
            sections.append("No answer (stopped, killed, or stuck outside of Python):\n" + _lines(_silent, self.silent))
        if self.absent:
            sections.append("Busy, in no collective:\n" + _lines(_busy, self.absent))
        waiting = [answer.record for answer in self.answers if answer.record.waited_s is not None]
        sections.append("Waiting:\n" + "\n".join(_waiting(waiting)))
        order = sorted(self.answers, key=lambda answer: (answer.record.waited_s is not None, answer.record.rank))
        sections += [f"{answer.record.process()}, {answer.record.place()}\n{answer.stacks}" for answer in order]
        return "\n\n".join(sections) + "\n"


_SOME = 4
"""Ranks that a sentence names."""


def _lines(describe: Callable[[RankRecord], str], records: Sequence[RankRecord]) -> str:
    return "\n".join(f"  {describe(record)}" for record in records)


def _silent(record: RankRecord) -> str:
    inside = "in" if record.waited_s is not None else "after"
    last = f", {inside} {record.call()}" if record.collective else ""
    return f"{record.process()}: last seen at {record.clock()} in {record.place()}{last}"


def _busy(record: RankRecord) -> str:
    last = f", last collective {record.call()}" if record.collective else ""
    return f"{record.process()}: in {record.place()}{last}"


def _waiting(records: Sequence[RankRecord]) -> list[str]:
    """A line for all ranks that are at the same place."""
    together: dict[str, list[RankRecord]] = {}
    for record in records:
        together.setdefault(f"in {record.call()}, in {record.place()}", []).append(record)
    return [
        f"  {name_ranks([record.rank for record in group])}: for {max(r.waited_s or 0.0 for r in group):.0f} s {place}"
        for place, group in together.items()
    ]
