"""Rows of parquet files by number, read lazily: a row group is decoded when one of its rows is asked for.

A file may be a local path or any URL that fsspec knows (`s3://`, `gs://`, `hdfs://`, `memory://` …). Opening reads only
the footers; no file is held open in between, so thousands of files cost no descriptors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.errors import ConfigError

CACHE_BYTES = 512 * 2**20
"""Decoded row groups that are kept. Shuffled rows come from anywhere, so a dataset that fits is read once; of a larger
one, each batch reads every row group that it needs once (`ParquetRows.read`)."""

_SCAN_ROWS = 1024
"""Rows that `ParquetRows.scan` hands on at once."""


CHAT_TYPE = 'chat messages: a list of {"role": …, "content": …}, both text'
"""What `is_chat` accepts, in words."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column that the rows need, and which types it may have."""

    name: str
    accepts: Callable[[pa.DataType], bool]
    expected: str
    """The types in words, for errors."""
    required: bool = True
    """Whether a file without it is an error; if not, its rows have None there."""


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings."""
    if pa.types.is_dictionary(kind):  # categories, as pandas writes them
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_chat(kind: pa.DataType) -> bool:
    """Whether values are lists of chat messages: structs with a `role` and a `content`, both text."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    message = kind.value_type
    return all(message.get_field_index(name) >= 0 and is_text(message.field(name).type) for name in ("role", "content"))


@dataclass(frozen=True, slots=True)
class _RowGroup:
    file: int
    """Which of the files."""
    number: int
    """Which of the file's row groups."""
    row_in_file: int
    """The file's row that it begins with."""


class ParquetRows:
    """Rows of several files, numbered from 0 in the order of the files; each a dict of the asked-for columns."""

    def __init__(self, files: Sequence[str], columns: Sequence[Column], *, cache_bytes: int = CACHE_BYTES) -> None:
        """Reads the footers and compares the schemas with `columns`.

        Args:
            cache_bytes: decoded row groups that are kept; the last one used is kept whatever its size.

        Raises:
            ConfigError: a file that cannot be read or is not parquet, lacks a column, or has one of another type; or
                files without any row.
        """
        self.files = list(files)
        self.columns = list(columns)
        self._metadata: list[pq.FileMetaData] = []
        self._groups: list[_RowGroup] = []
        starts = [0]
        for index, file in enumerate(self.files):
            with _open(file) as parquet:
                _check_schema(file, parquet.schema_arrow, self.columns)
                self._metadata.append(parquet.metadata)
            row_in_file = 0
            for number in range(self._metadata[index].num_row_groups):
                self._groups.append(_RowGroup(index, number, row_in_file))
                rows = self._metadata[index].row_group(number).num_rows
                row_in_file += rows
                starts.append(starts[-1] + rows)
        self._starts = np.array(starts, dtype=np.int64)
        if len(self) == 0:
            raise ConfigError(f"{', '.join(self.files) or 'no file'}: there are no rows to read; write the data again.")
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.read([row])[0]

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Rows by number, in the order asked for; each row group among them is decoded at most once.

        Raises:
            IndexError: a number out of range.
            ConfigError: a row group that cannot be read.
        """
        numbers = np.asarray(rows, dtype=np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= len(self)):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} asked for, there are 0 to {len(self) - 1}")
        groups = self._group_of(numbers)
        values: list[dict[str, Any]] = [{}] * len(numbers)
        for index in np.argsort(groups, kind="stable").tolist():
            group = int(groups[index])
            table = self._table(group)
            values[index] = table.slice(int(numbers[index] - self._starts[group]), 1).to_pylist()[0]
        return values

    def scan(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """All rows in order, as (number of the first row, some rows). Leaves the cache alone.

        Raises:
            ConfigError: a row group that cannot be read.
        """
        row = 0
        for file in self.files:
            with _open(file) as parquet, _reading(file):
                names = self._present(parquet.schema_arrow)
                for batch in parquet.iter_batches(batch_size=_SCAN_ROWS, columns=names):
                    yield row, self._with_absent(pa.Table.from_batches([batch])).to_pylist()
                    row += batch.num_rows

    def where(self, row: int) -> str:
        """The file and its own row number, from 0, for errors."""
        group = int(self._group_of(np.array([row]))[0])
        entry = self._groups[group]
        return f"{self.files[entry.file]}, row {entry.row_in_file + row - int(self._starts[group])}"

    def _group_of(self, rows: np.ndarray) -> np.ndarray:
        """The row group of each row. The right-hand side skips groups without rows."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _table(self, group: int) -> pa.Table:
        if group in self._cache:
            self._cache.move_to_end(group)
            return self._cache[group]
        entry = self._groups[group]
        file = self.files[entry.file]
        with _open(file, self._metadata[entry.file]) as parquet, _reading(file):
            table = parquet.read_row_group(entry.number, columns=self._present(parquet.schema_arrow))
        self._cache[group] = self._with_absent(table)
        while len(self._cache) > 1 and sum(table.nbytes for table in self._cache.values()) > self._cache_bytes:
            self._cache.popitem(last=False)
        return self._cache[group]

    def _present(self, schema: pa.Schema) -> list[str]:
        return [column.name for column in self.columns if column.name in schema.names]

    def _with_absent(self, table: pa.Table) -> pa.Table:
        for column in self.columns:
            if column.name not in table.column_names:
                table = table.append_column(column.name, pa.nulls(table.num_rows))
        return table


def read_schema(file: str) -> pa.Schema:
    """The columns of a file, by its footer.

    Raises:
        ConfigError: the file cannot be read or is not parquet.
    """
    with _open(file) as parquet:
        return parquet.schema_arrow


def _open(file: str, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """The caller closes it. `metadata` of an earlier opening saves reading the footer again."""
    try:
        filesystem, path = fsspec.url_to_fs(file)
        return pq.ParquetFile(path, metadata=metadata, filesystem=filesystem)
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist.") from None
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{file} is not a parquet file ({_one_line(error)}): convert or copy it again.") from None
    except Exception as error:  # each kind of URL has errors of its own: credentials, network, a package not installed
        raise ConfigError(f"{file} cannot be read ({type(error).__name__}: {_one_line(error)}).") from error


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Names the file in errors that come after its footer was read: damaged pages, a connection that broke."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{file} cannot be read to its end ({_one_line(error)}): copy it again.") from error


def _check_schema(file: str, schema: pa.Schema, columns: Sequence[Column]) -> None:
    for column in columns:
        if column.name in schema.names:
            kind = schema.field(column.name).type
            if not (column.accepts(kind) or (pa.types.is_null(kind) and not column.required)):
                raise ConfigError(f"{file}: column '{column.name}' is {kind}, but must be {column.expected}.")
        elif column.required:
            raise ConfigError(
                f"{file}: there is no column '{column.name}' ({column.expected}); it has {', '.join(schema.names)}."
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
