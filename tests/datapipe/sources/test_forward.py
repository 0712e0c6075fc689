"""Streams that go forwards only, and records of text put together and apart."""

from __future__ import annotations

import io
from pathlib import Path

import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe.sources import Fault, Record, TextRows, gathered
from datapipe.sources.compression import open_plain
from datapipe.sources.forward import ForwardFile
from datapipe.sources.record import Item
from datapipe.sources.text_rows import one_by_one

DATA = bytes(range(256)) * 40


@given(steps=st.lists(st.tuples(st.integers(0, len(DATA) + 10), st.integers(0, 700)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_order_of_seeks_reads_the_same(steps: list[tuple[int, int]]) -> None:
    starts = []

    def begin() -> io.BytesIO:
        starts.append(1)
        return io.BytesIO(DATA)

    with io.BufferedReader(ForwardFile(begin), 512) as file:
        for at, size in steps:
            file.seek(at)
            assert file.read(size) == DATA[at : at + size]
        assert file.seek(0, io.SEEK_END) == len(DATA)


def test_reading_in_order_begins_once(tmp_path: Path) -> None:
    starts = []

    def begin() -> io.BytesIO:
        starts.append(1)
        return io.BytesIO(DATA)

    with ForwardFile(begin) as file:
        for at in range(0, len(DATA), 1000):
            file.seek(at)
            assert file.read(10) == DATA[at : at + 10]
    assert len(starts) == 1


def test_zst_with_frames_of_all_sizes(tmp_path: Path) -> None:
    pieces = [b"", b"x", b"y" * 2_000_000, DATA]
    (tmp_path / "t.zst").write_bytes(b"".join(map(zstandard.compress, pieces)))
    with open_plain(tmp_path / "t.zst") as file:
        assert file.read() == b"".join(pieces)
        file.seek(1)
        assert file.read(3) == b"yyy"


def record(key: str, **options: object) -> Record:
    return Record(key=key, place=f"t:{key}", load=None, **options)  # type: ignore[arg-type]


def test_texts_are_gathered_in_order() -> None:
    fault = Fault(key="f", place="t:f", reason="bad", detail="x")
    picture = Record(key="p", place="t:p", load=lambda: b"", caption="c")
    items: list[Item] = [
        *(record("a", columns={"n": 1}), record("b", columns={"n": 2})),
        *(fault, record("c", columns={"n": 3}), record("d", columns={"m": 4}), picture),
        *(record("e", caption="x"), record("g", caption="y"), record("h", optional=frozenset({"image"}))),
    ]
    found = list(gathered(items))
    assert [len(item) if isinstance(item, TextRows) else item.key for item in found] == [
        2,
        "f",
        "c",
        "d",
        "p",
        2,
        "h",
    ]
    assert list(one_by_one(found)) == items
    assert [
        len(block) for block in TextRows(keys=[*"abcde"], places=[*"abcde"], captions=[*"abcde"]).blocks(2)
    ] == [*(2, 2, 1)]
