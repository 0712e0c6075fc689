"""Damaged tars and tables give rows, faults or one clear error; nothing else."""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe.errors import SourceError
from datapipe.sources import Fault, Note, Record, open_sources
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
    ("t.tar.gz", gzip.compress(_tar(tarfile.PAX_FORMAT))),
    ("t.parquet", _parquet()),
    ("t.arrow", _arrow()),
    ("t.csv", b'image,caption,n\na.jpg,"one, two",1\nb.jpg,three,2\n' * 3),
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
    for place, value in changes:
        damaged[int(place * len(damaged))] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(bytes(damaged))
        try:
            (source,) = open_sources([path])
            source.observe_columns(ColumnKinds())
            items = list(source.items())
        except SourceError as error:
            assert name in str(error)
            return
        for item in items:
            assert isinstance(item, Record | Fault | Note)
            if isinstance(item, Fault):
                assert item.reason and item.detail and item.place.startswith("t.")
                item.place.encode()
        assert {entry.name for entry in Path(folder).iterdir()} == {name}
