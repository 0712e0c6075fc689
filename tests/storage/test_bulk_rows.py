"""Rows added many at a time: the same rows and the same errors as one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage import ColumnError, ColumnTypeError, DuplicateKeyError, FeatureStore, StorageError


def contents(store: FeatureStore) -> list[dict[str, object]]:
    return list(store.query("SELECT * EXCLUDE (row) FROM samples ORDER BY row").to_pylist())


def test_equal_to_rows_one_by_one(tmp_path: Path) -> None:
    keys = [f"k{index}" for index in range(9000)]
    columns: dict[str, list[object]] = {
        "text": [f"text ü {index}" for index in range(9000)],
        "score": [None if index % 3 else index for index in range(9000)],
        "mixed": [index if index % 2 else float(index) for index in range(9000)],
        "late": [None] * 8999 + ["last"],
        "nested": [[index] for index in range(9000)],
    }
    kinds = {"mixed": "float"}
    bulk, single = FeatureStore.create(tmp_path / "bulk"), FeatureStore.create(tmp_path / "single")
    with bulk.writer(message="bulk", columns=kinds) as writer:
        writer.add("first", b"blob", other=1)
        writer.add_rows(keys, columns)
        writer.add("last", b"blob", text="x")
        assert len(writer) == 9002
    with single.writer(message="single", columns=kinds) as writer:
        writer.add("first", b"blob", other=1)
        for at, key in enumerate(keys):
            writer.add(key, None, None, **{name: values[at] for name, values in columns.items()})
        writer.add("last", b"blob", text="x")
    bulk, single = bulk.refresh(), single.refresh()
    assert bulk.columns == single.columns and contents(bulk) == contents(single)
    assert bulk.row("k8999") == 9000 and bulk.verify().ok


def test_blobs_of_all_sizes_are_found_where_they_lie(tmp_path: Path) -> None:
    sizes = [0, 1, 100, 4095, 4096, 5000, 70_000]
    blobs = [None if index % 8 == 7 else bytes([index % 251]) * sizes[index % 7] for index in range(700)]
    keys = [f"k{index:04d}"[::-1] for index in range(700)]
    store = FeatureStore.create(tmp_path / "s")
    with store.writer(message="bulk") as writer:
        writer.add_rows(keys, {"n": list(range(700))}, blobs)
        with pytest.raises(ColumnError, match=r"other lengths: \{.blobs.: 1\}"):
            writer.add_rows(["x", "y"], {}, [b"1"])
        with pytest.raises(StorageError, match=r"row 701 of the commit, key .*: the blob is str"):
            writer.add_rows(["x", "y"], {}, [b"1", "text"])  # type: ignore[list-item]
    store = store.refresh()
    for index in range(700):
        wanted = blobs[index]
        assert wanted is None or bytes(store.blob(index)) == wanted
    assert store.verify().ok and store.columns.keys() >= {"hash", "bytes", "n"}


@pytest.mark.parametrize(
    ("keys", "columns", "error", "message"),
    [
        (["a", "b", "a"], {}, DuplicateKeyError, "row 2 of the commit, key 'a': row 0 of the same commit"),
        (["a", "old"], {}, DuplicateKeyError, "key 'old': row 0 of"),
        (["a", "b"], {"n": [1, "x"]}, ColumnTypeError, "row 1 of the commit, key 'b'.*'n' is string"),
        (["a", "b"], {"t": ["x", "\ud800"]}, ColumnTypeError, "key 'b'.*not valid UTF-8"),
        (["a", "b"], {"n": [1]}, ColumnError, "2 keys, but columns of other lengths"),
        (["a", ""], {}, ColumnError, "a key is empty"),
    ],
)
def test_an_error_leaves_the_commit_as_it_was(
    tmp_path: Path,
    keys: list[str],
    columns: dict[str, list[object]],
    error: type[Exception],
    message: str,
) -> None:
    store = FeatureStore.create(tmp_path / "s")
    with store.writer(message="old") as writer:
        writer.add("old", n=1, t="x")
    with store.refresh().writer(message="new") as writer:
        with pytest.raises(error, match=message):
            writer.add_rows(keys, columns)
        writer.add_rows(["a", "b"], {"n": [2, None]})
    assert store.refresh().select().keys() == ["old", "a", "b"]


def test_tensor_columns_are_left_out(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "s")
    with store.writer(message="m", tensors={"v": ("float32", (2,))}) as writer:
        writer.add_rows(["a", "b"], {"t": ["x", "y"]})
    assert store.refresh().select().keys() == ["a", "b"]
