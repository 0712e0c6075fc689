"""Rows of CSV, JSON lines and Parquet: the good ones come, the bad ones are told."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from datapipe.errors import SourceError
from datapipe.sources import Fault, FieldMap
from datapipe.sources.row import Row
from datapipe.sources.rows import check_table, count_rows, read_rows


def read(path: Path) -> list[dict[str, object] | str]:
    return [row.values if isinstance(row, Row) else f"{row.place} {row.reason}" for row in read_rows(path)]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        b'\xef\xbb\xbfid,caption\r\n007,"two\nlines, ""quoted"""\r\n\r\n8\r\n9,a,b\r\n10,caf\xe9\r\n11,ok\r\n'
    )
    assert read(path) == [
        {"id": "007", "caption": 'two\nlines, "quoted"'},
        "t.csv:5 ragged_row",
        "t.csv:6 ragged_row",
        "t.csv:7 not_utf8",
        {"id": "11", "caption": "ok"},
    ]
    assert count_rows(path) >= 5


def test_tsv(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("id\tcaption\n1\ta, b\n")
    assert read(tmp_path / "t.tsv") == [{"id": "1", "caption": "a, b"}]


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_csv_of_other_separators(tmp_path: Path, mark: str) -> None:
    (tmp_path / "t.csv").write_text(f'id{mark}caption\n1{mark}a, b\n2{mark}"c{mark}d"\n')
    assert read(tmp_path / "t.csv") == [{"id": "1", "caption": "a, b"}, {"id": "2", "caption": f"c{mark}d"}]
    (tmp_path / "u.csv").write_text(f"caption{mark}s,id\na,1\n")
    assert read(tmp_path / "u.csv") == [{f"caption{mark}s": "a", "id": "1"}]


def test_csv_field_without_end(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('id,caption\n1,ok\n2,"' + "x" * 200_000)
    assert read(tmp_path / "t.csv") == [{"id": "1", "caption": "ok"}, "t.csv:3 bad_csv"]


@pytest.mark.parametrize(
    ("head", "message"), [("", "the file is empty"), ("a,b,a\n", "columns 1 and 3 are both named 'a'")]
)
def test_csv_heads(tmp_path: Path, head: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(head)
    with pytest.raises(SourceError, match=message):
        check_table(tmp_path / "t.csv", FieldMap())


def test_csv_head_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"id,caf\xe9\n")
    with pytest.raises(SourceError, match="name of column 2 is not UTF-8"):
        check_table(tmp_path / "t.csv", FieldMap())


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [
        b'\xef\xbb\xbf{"id": 18446744073709551615}',
        b"",
        b"[1]",
        b"{",
        b'{"a": 1, "a": 2}',
        b'{"a": "\xff"}',
    ]
    lines += [b"[" * 100_000, b'{"a": NaN, "b": "\\ud83d\\ude00"}']
    path.write_bytes(b"\n".join(lines))
    found = read(path)
    assert found[:5] == [
        {"id": 18446744073709551615},
        "t.jsonl:3 bad_json",
        "t.jsonl:4 bad_json",
        "t.jsonl:5 repeated_key",
        "t.jsonl:6 not_utf8",
    ]
    assert found[5] == "t.jsonl:7 bad_json" and found[6]["b"] == "😀"  # type: ignore[index]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    text = pa.array([b"ok", b"caf\xe9", None, b"end"], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 4, text.buffers(), null_count=1)
    pq.write_table(pa.table({"n": [1, 2, 3, 4], "caption": broken}), path)
    assert read(path) == [
        {"n": 1, "caption": "ok"},
        "t.parquet#2 not_utf8",
        {"n": 3, "caption": None},
        {"n": 4, "caption": "end"},
    ]
    assert count_rows(path) == 4


def test_parquet_without_its_end(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "t.parquet")
    data = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(data[:-3])
    with pytest.raises(SourceError, match="not a complete Parquet file"):
        check_table(tmp_path / "t.parquet", FieldMap())


def test_parquet_damaged_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"n": [f"row {index}" for index in range(5000)]}),
        path,
        row_group_size=1000,
        use_dictionary=False,
    )
    data = bytearray(path.read_bytes())
    third = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data[third : third + 60] = b"\xff" * 60
    path.write_bytes(bytes(data))
    found = list(read_rows(path))
    assert sum(isinstance(row, Row) for row in found) == 4000
    assert isinstance(found[-1], Row) and found[-1].place == "t.parquet#5000"
    fault = next(row for row in found if isinstance(row, Fault))
    assert (fault.place, fault.reason) == ("t.parquet#2001", "bad_parquet")
    assert "after row 2000 of 5000, 1000 rows of row group 2 are lost" in fault.detail


@pytest.mark.parametrize("kind", ["stream", "file", "feather"])
def test_arrow(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("t.feather" if kind == "feather" else "t.arrow")
    table = pa.table({"n": range(150), "caption": [f"row {index}" for index in range(150)]})
    if kind == "feather":
        feather.write_feather(table, path)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    found = read(path)
    assert len(found) == 150 and found[149] == {"n": 149, "caption": "row 149"}
    places = [row.place for row in read_rows(path)]
    assert places[0] == f"{path.name}#1" and places[-1] == f"{path.name}#150"
    check_table(path, FieldMap(mapping={"caption": "caption"}))
    with pytest.raises(SourceError, match="column 'text'"):
        check_table(path, FieldMap(mapping={"caption": "text"}))


def test_arrow_that_ends_early(tmp_path: Path) -> None:
    table = pa.table({"n": range(3000)})
    for name, make in (("s.arrow", pa.ipc.new_stream), ("f.arrow", pa.ipc.new_file)):
        with make(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) * 2 // 3])
    found = list(read_rows(tmp_path / "s.arrow"))
    assert sum(isinstance(row, Row) for row in found) in (1000, 2000)
    assert isinstance(found[-1], Fault) and found[-1].reason == "bad_arrow"
    with pytest.raises(SourceError, match="not a complete Arrow file"):
        check_table(tmp_path / "f.arrow", FieldMap())


def test_unknown_table(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no table format"):
        check_table(tmp_path / "t.xlsx", FieldMap())
