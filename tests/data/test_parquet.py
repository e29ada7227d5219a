"""Rows of parquet files come by number, lazily, and what is wrong with a file is said with its name."""

import random

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import ConfigError
from megarl.data.parquet import Column, ParquetRows, is_chat, is_text, read_schema

TEXT = Column(name="text", accepts=is_text, expected="text")
NUMBER = Column(name="number", accepts=pa.types.is_integer, expected="a whole number", required=False)


def write(path, texts, *, row_group_size=10, **columns):
    table = pa.table({"text": pa.array(texts, pa.string()), **columns})
    pq.write_table(table, path, row_group_size=row_group_size)
    return str(path)


@pytest.fixture
def reads(monkeypatch):
    """The row groups that are decoded, in order."""
    seen = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda file, i, *a, **k: (seen.append(i), original(file, i, *a, **k))[1]
    )
    return seen


def test_rows_are_numbered_through_all_files(tmp_path):
    texts = [f"row {number}" for number in range(57)]
    files = [
        write(tmp_path / "a.parquet", texts[:23]),
        write(tmp_path / "empty.parquet", []),
        write(tmp_path / "b.parquet", texts[23:], row_group_size=4),
    ]
    rows = ParquetRows(files, [TEXT])
    assert len(rows) == 57
    assert [rows[number]["text"] for number in range(57)] == texts
    order = random.Random(0).choices(range(57), k=100)
    assert [row["text"] for row in rows.read(order)] == [texts[number] for number in order]
    scanned = [(first + i, row["text"]) for first, part in rows.scan() for i, row in enumerate(part)]
    assert scanned == list(enumerate(texts))
    assert rows.where(22) == f"{files[0]}, row 22"
    assert rows.where(23) == f"{files[2]}, row 0"
    for outside in (-1, 57):
        with pytest.raises(IndexError):
            rows.read([outside])


def test_an_optional_column_that_a_file_lacks_is_none(tmp_path):
    files = [write(tmp_path / "a.parquet", ["x"], number=pa.array([1])), write(tmp_path / "b.parquet", ["y"])]
    rows = ParquetRows(files, [TEXT, NUMBER])
    expected = [{"text": "x", "number": 1}, {"text": "y", "number": None}]
    assert rows.read([0, 1]) == expected
    assert [row for _, part in rows.scan() for row in part] == expected


def test_columns_that_nobody_asked_for_are_not_read(tmp_path):
    file = write(tmp_path / "a.parquet", ["x"], number=pa.array([1]))
    assert ParquetRows([file], [TEXT])[0] == {"text": "x"}


def test_opening_decodes_nothing_and_a_row_decodes_its_row_group_alone(tmp_path, reads):
    file = write(tmp_path / "a.parquet", [str(number) for number in range(100)])
    rows = ParquetRows([file], [TEXT])
    assert reads == []
    assert rows[42]["text"] == "42"
    assert rows[47]["text"] == "47"
    assert reads == [4]


def test_a_shuffled_epoch_of_a_dataset_that_fits_decodes_each_row_group_once(tmp_path, reads):
    file = write(tmp_path / "a.parquet", [str(number) for number in range(100)])
    rows = ParquetRows([file], [TEXT])
    order = list(range(100))
    random.Random(0).shuffle(order)
    assert [rows[number]["text"] for number in order] == [str(number) for number in order]
    assert sorted(reads) == list(range(10))


def test_a_batch_decodes_each_row_group_once_even_without_room_for_two(tmp_path, reads):
    file = write(tmp_path / "a.parquet", [str(number) for number in range(100)])
    rows = ParquetRows([file], [TEXT], cache_bytes=0)
    batch = [5, 95, 7, 93, 3, 50]
    assert [row["text"] for row in rows.read(batch)] == [str(number) for number in batch]
    assert sorted(reads) == [0, 5, 9]


def test_the_row_groups_used_last_are_kept(tmp_path, reads):
    file = write(tmp_path / "a.parquet", ["x" * 1000] * 30)
    group_bytes = pq.ParquetFile(file).read_row_group(0).nbytes
    reads.clear()
    rows = ParquetRows([file], [TEXT], cache_bytes=2 * group_bytes)
    for number in (0, 10, 0, 20, 0, 10):  # 20 puts 10 out, since 0 was used after it
        rows[number]
    assert reads == [0, 1, 2, 1]


def test_a_file_may_lie_behind_any_fsspec_url(tmp_path):
    table = pa.table({"text": ["from", "memory"]})
    with fsspec.open("memory://folder/a.parquet", "wb") as file:
        pq.write_table(table, file)
    local = write(tmp_path / "b.parquet", ["local"])
    rows = ParquetRows(["memory://folder/a.parquet", f"file://{local}"], [TEXT])
    assert [row["text"] for row in rows.read([0, 1, 2])] == ["from", "memory", "local"]
    assert read_schema("memory://folder/a.parquet").names == ["text"]


def test_types_that_mean_the_same_are_accepted():
    assert is_text(pa.large_string()) and is_text(pa.dictionary(pa.int32(), pa.string()))
    assert not is_text(pa.binary()) and not is_text(pa.int64())
    message = pa.struct({"role": pa.string(), "content": pa.large_string(), "name": pa.string()})
    assert is_chat(pa.list_(message)) and is_chat(pa.large_list(message))
    assert not is_chat(pa.string()) and not is_chat(message) and not is_chat(pa.list_(pa.string()))
    assert not is_chat(pa.list_(pa.struct({"role": pa.string(), "content": pa.list_(pa.string())})))


def damage(path):
    """Flips the bytes of the pages, and leaves the footer whole."""
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(byte ^ 0xFF for byte in content[4:200])
    path.write_bytes(content)


def test_a_bad_file_is_named_in_one_sentence(tmp_path):
    good = write(tmp_path / "good.parquet", ["x"])
    numbers = tmp_path / "numbers.parquet"
    pq.write_table(pa.table({"text": [1, 2]}), numbers)
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"question": ["x"], "answer": ["y"]}), other)
    (tmp_path / "page.parquet").write_text("<html>not found</html>", encoding="utf-8")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-10])
    cases = {
        numbers: ["column 'text' is int64", "must be text"],
        other: ["no column 'text'", "question, answer"],
        tmp_path / "page.parquet": ["not a parquet file"],
        tmp_path / "cut.parquet": ["not a parquet file"],
        tmp_path / "nowhere.parquet": ["does not exist"],
        tmp_path: ["cannot be read"],
        write(tmp_path / "empty.parquet", []): ["no rows"],
        "nothing://bucket/a.parquet": ["cannot be read", "nothing"],
    }
    for bad, words in cases.items():
        files = [str(bad)] if "no rows" in words else [good, str(bad)]
        with pytest.raises(ConfigError) as error:
            ParquetRows(files, [TEXT])
        for word in [str(bad), *words]:
            assert word in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="no rows"):
        ParquetRows([], [TEXT])


def test_a_damaged_row_group_is_named_when_it_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"some text {number}" for number in range(100)]}), path)
    damage(path)
    rows = ParquetRows([str(path)], [TEXT])
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read to its end"):
        rows[0]
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read to its end"):
        list(rows.scan())
