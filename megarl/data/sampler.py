"""Which rows each step takes: a pure function of (seed, position), so that ranks agree without communication."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.config.errors import ConfigError

_SEED_RANGE = 2**64
"""Seeds of numpy are not negative; a negative seed counts down from here."""


class PromptSampler:
    """Draws batches of row numbers from an endless stream of epochs, each a new order of all rows.

    Batches may cross the end of an epoch: no row is lost because the dataset does not divide by the batch size. A batch
    that does may hold a row twice, once from each epoch. Only at the end of a run, rows may be left that do not fill a
    batch (`num_batches`). (verl drops the last rows of every epoch.)
    """

    def __init__(
        self, num_rows: int, batch_size: int, *, shuffle: bool, seed: int, fingerprint: str | None = None
    ) -> None:
        """Args:
            num_rows: rows of the dataset, after filtering.
            batch_size: rows of one batch, over all ranks.
            shuffle: whether each epoch has its own random order; if not, rows come in the order of the files.
            fingerprint: what tells the rows from others.

        Raises:
            ConfigError: fewer rows than a batch.
        """
        if batch_size > num_rows:
            raise ConfigError(
                f"data.train_batch_size is {batch_size}, but the training files have only {num_rows} usable rows: "
                f"lower it to {num_rows} or less, or add data."
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.fingerprint = fingerprint
        self._drawn = 0
        self._reordered: list[tuple[int, int]] = []
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> float:
        """Epochs drawn so far, e.g. 1.5."""
        return self._drawn / self.num_rows

    def num_batches(self, epochs: int) -> int:
        """Whole batches in this many epochs."""
        return epochs * self.num_rows // self.batch_size

    def next_batch(self) -> list[int]:
        """The next `batch_size` row numbers."""
        batch: list[int] = []
        while len(batch) < self.batch_size:
            epoch, start = divmod(self._drawn, self.num_rows)
            rows = self._epoch_order(epoch)[start : start + self.batch_size - len(batch)]
            batch += rows.tolist()
            self._drawn += len(rows)
        return batch

    def reorder(self, number: int) -> None:
        """From here on, rows come in another order; those of this epoch that were drawn are not drawn again in it.

        Args:
            number: each gives its own order.
        """
        self._reordered.append((self._drawn, number))
        self._order = None

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands. Counted in rows, so that a run may resume with another batch size."""
        return {
            "drawn": self._drawn,
            "num_rows": self.num_rows,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "reordered": [list(each) for each in self._reordered],
        }

    def difference(self, state: dict[str, Any]) -> str | None:
        """How a state is of other data or of another order, in which rows would be missed or come twice; or None."""
        if state["num_rows"] != self.num_rows:
            return (
                f"data.train_files have {self.num_rows} usable rows (by data.max_prompt_length and data.truncation), "
                f"but had {state['num_rows']}"
            )
        if state["fingerprint"] != self.fingerprint:
            return f"data.train_files have {self.num_rows} usable rows as before, but their rows are others"
        for name, key in (("shuffle", "data.shuffle"), ("seed", "data.seed (null: trainer.seed)")):
            if state[name] != getattr(self, name):
                return f"{key} is {getattr(self, name)}, but was {state[name]}"
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken, of the same data in the same order (`difference`)."""
        self._drawn = state["drawn"]
        self._reordered = [(drawn, number) for drawn, number in state["reordered"]]
        self._order = None

    def begin_anew(self) -> None:
        """Go back to the first row of the first epoch."""
        self._drawn = 0
        self._reordered = []
        self._order = None

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """All row numbers in the order of an epoch, int64 [num_rows]."""
        if self._order is None or self._order[0] != epoch:
            order = epoch_order(self.num_rows, epoch, shuffle=self.shuffle, seed=self.seed)
            for drawn, number in self._reordered:
                # Of an earlier epoch: all rows of this one come anew.
                start = max(drawn - epoch * self.num_rows, 0)
                order[start:] = order[start:][_permutation(self.seed, epoch, number, size=len(order[start:]))]
            self._order = (epoch, order)
        return self._order[1]


def epoch_order(num_rows: int, epoch: int, *, shuffle: bool, seed: int) -> np.ndarray:
    """All row numbers in the order of one epoch, int64 [num_rows].

    From numpy's RandomState, whose stream is frozen: that of `default_rng` may change with numpy's version, and a
    resumed run would then take rows twice and miss others (NEP 19).
    """
    if not shuffle:
        return np.arange(num_rows)
    return _permutation(seed, epoch, size=num_rows)


def _permutation(seed: int, *numbers: int, size: int) -> np.ndarray:
    sequence = np.random.SeedSequence([seed % _SEED_RANGE, *numbers])
    return np.random.RandomState(np.random.MT19937(sequence)).permutation(size)
