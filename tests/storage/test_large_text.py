"""Text and blobs beyond two gigabytes in one part."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from storage import ColumnTypeError
from storage import columns as columns_module


def test_a_text_that_parquet_cannot_hold_is_refused(empty, monkeypatch):
    monkeypatch.setattr(columns_module, "_MAX_TEXT_BYTES", 1000)
    empty.append([{"key": "fits", "text": "é" * 500}])
    for value in ("é" * 501, ["x" * 1000]):
        with pytest.raises(ColumnTypeError, match=r"key 'k'.*'(text|meta)' has a text of 100\d bytes"):
            empty.append([{"key": "k", "text" if isinstance(value, str) else "meta": value}])
    assert empty.refresh().select("length(text) = 500").keys() == ["fits"]


@pytest.mark.slow
def test_two_gigabytes_of_text_in_one_part(empty):
    """2,200 texts of a megabyte: 2.3 GB in one column of one part."""
    filler = "0123456789abcdef" * (1 << 16)
    with empty.writer() as writer:
        for i in range(2200):
            writer.add(f"k{i}", text=f"{i} {filler}", n=i)
    store = empty.refresh()
    assert len(store.snapshot.parts) == 1
    some = store.select("n IN (0, 1100, 2199)")
    assert [text[:6] for text in some.column("text").to_pylist()] == ["0 0123", "1100 0", "2199 0"]
    (total,) = store.query("SELECT sum(length(text))::BIGINT FROM samples")[0].to_pylist()
    assert total == 2200 * (1 << 20) + sum(len(f"{i} ") for i in range(2200)) > 1 << 31
    assert store.select("starts_with(text, '2198 ')").rows.tolist() == [2198]


@pytest.mark.slow
def test_a_blob_beyond_two_gigabytes(empty):
    size = (1 << 31) + 5
    with mmap.mmap(-1, size) as large:
        large[-3:] = b"end"
        with memoryview(large) as blob, empty.writer() as writer:
            writer.add("large", blob)
            writer.add("small", b"small")
    store = empty.refresh()
    found = store.blob(0)
    assert len(found) == size and bytes(found[-4:]) == b"\0end" and store.blob(1) == b"small"
    assert not np.frombuffer(found[: 1 << 20], np.uint8).any()
    assert store.query("SELECT max(bytes) FROM samples")[0].to_pylist() == [size]
