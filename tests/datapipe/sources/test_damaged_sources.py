"""Damaged tars and tables give rows, faults or one clear error; nothing else."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datapipe.errors import DecodeError, SourceError
from datapipe.sources import Fault, Note, Record, TextRows, open_sources
from datapipe.sources.column_kinds import ColumnKinds


def _tar(format: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name in ("a", "b", "ü" * 120, "c"):
            for suffix, data in (
                ("jpg", b"\xff\xd8\xff" + b"x" * 700),
                ("txt", b"text"),
                ("json", b'{"n": 1}'),
            ):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _parquet() -> bytes:
    buffer = io.BytesIO()
    table = pa.table({"image": [b"x"] * 40, "caption": ["text"] * 40, "n": range(40)})
    pq.write_table(table, buffer, row_group_size=10)
    return buffer.getvalue()


def _arrow() -> bytes:
    buffer = io.BytesIO()
    table = pa.table({"image": [b"x"] * 40, "caption": ["text"] * 40})
    with pa.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return buffer.getvalue()


FILES = [
    ("t.tar", _tar(tarfile.PAX_FORMAT)),
    ("t.tar", _tar(tarfile.GNU_FORMAT)),
    ("t.tar.gz", gzip.compress(_tar(tarfile.PAX_FORMAT), mtime=0)),
    ("t.parquet", _parquet()),
    ("t.arrow", _arrow()),
    ("t.csv", b'image,caption,n\na.jpg,"one, two",1\nb.jpg,three,2\n' * 3),
    (
        "t.tar.zst",
        zstandard.compress(_tar(tarfile.GNU_FORMAT)[:3000])
        + zstandard.compress(_tar(tarfile.GNU_FORMAT)[3000:]),
    ),
    ("t.txt", b"\xef\xbb\xbfone\r\ntwo\n\nthree"),
    ("t.csv.gz", gzip.compress(b"prompt,n\none,1\ntwo,2\n", mtime=0)),
    (
        "t.json",
        json.dumps(
            [{"image": ["a.jpg", "b.jpg"], "conversations": [{"from": "human", "value": "<image><image>"}]}]
            * 3
        ).encode(),
    ),
    (
        "t.jsonl",
        json.dumps({"prompt": "Q", "chosen": "a", "rejected": [{"role": "user", "content": "x"}]}).encode(),
    ),
    ("t.jsonl", b'{"image": "a.jpg", "caption": "one", "m": {"k": [1, 2]}}\n' * 5),
]


@given(
    file=st.sampled_from(FILES),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=10),
    keep=st.sampled_from([1.0, 1.0, 0.99, 0.7, 0.1]),
)
@settings(max_examples=150, deadline=None)
def test_damage_is_told(file: tuple[str, bytes], changes: list[tuple[float, int]], keep: float) -> None:
    name, data = file
    damaged = bytearray(data[: int(len(data) * keep)])
    for place, value in changes if damaged else ():
        damaged[int(place * len(damaged))] = value
    check(name, bytes(damaged))


def check(name: str, data: bytes) -> None:
    """Read a file to its end: rows, faults, notes, or one clear error; and no other file appears."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            (source,) = open_sources([path])
            source.observe_columns(ColumnKinds())
            items = list(source.items())
        except SourceError as error:
            assert name in str(error)
            return
        for item in items:
            assert isinstance(item, Record | Fault | Note | TextRows)
            if isinstance(item, Record) and item.load is not None:
                try:
                    item.load()
                except DecodeError as error:
                    assert error.reason
            if isinstance(item, Fault):
                assert item.reason and item.detail and item.place.startswith("t.")
                item.place.encode()
        assert {entry.name for entry in Path(folder).iterdir()} == {name}


def _set_checksum(data: bytearray, block: int) -> None:
    """Make a changed tar header count as one."""
    header = data[block : block + 512]
    header[148:156] = b" " * 8
    data[block + 148 : block + 156] = b"%06o\0 " % sum(header)


# Where names, sizes, kinds and prefixes stand in a tar header.
_FIELDS = st.one_of(st.integers(0, 99), st.integers(124, 135), st.just(156), st.integers(157, 500))
_VALUES = st.one_of(st.sampled_from(b"\0\xff\x80017xgLKSV2./"), st.integers(0, 255))


@given(
    format=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    changes=st.lists(st.tuples(st.floats(0, 0.999), _FIELDS, _VALUES), min_size=1, max_size=8),
    pack=st.sampled_from([bytes, bytes, gzip.compress, zstandard.compress]),
)
@example(format=tarfile.GNU_FORMAT, changes=[(0.0, 124, 0xFF)], pack=bytes)  # a size below zero
@example(
    format=tarfile.GNU_FORMAT, changes=[(0.0, 124, 0x80), (0.0, 130, 0xFF)], pack=bytes
)  # and a huge one
@settings(max_examples=150, deadline=None)
def test_tar_headers_may_say_anything(
    format: int, changes: list[tuple[float, int, int]], pack: Callable[[bytes], bytes]
) -> None:
    data = bytearray(_tar(format))
    for place, field, value in changes:
        block = int(place * (len(data) // 512)) * 512
        data[block + field] = value
        _set_checksum(data, block)
    check("t.tar", pack(bytes(data)))


_TEXT = st.text(st.sampled_from("ab,\"'\n\r\t\0\ufeff{}[]:\\ü\u2028 0"), max_size=60)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(2**80), 2**80)
    | st.sampled_from(["a.jpg", "<image>", "\ud800", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["from", "role", "value", "content", "type", "text", "image"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
_NAMES = [
    "key",
    "image",
    "images",
    "video",
    "caption",
    "prompt",
    "messages",
    "conversations",
    "system",
    "chosen",
    "rejected",
    "x",
]


@given(name=st.sampled_from(["t.csv", "t.tsv", "t.jsonl", "t.json", "t.txt"]), head=_TEXT, body=_TEXT)
@settings(max_examples=150, deadline=None)
def test_text_tables_may_hold_anything(name: str, head: str, body: str) -> None:
    check(name, f"{head}\n{body}".encode())


@given(rows=st.lists(st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=5), max_size=4))
@settings(max_examples=200, deadline=None)
def test_fields_may_hold_any_value(rows: list[dict[str, object]]) -> None:
    check("t.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    check("t.json", json.dumps(rows).encode())
