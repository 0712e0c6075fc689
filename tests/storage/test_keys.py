from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore, KeyNotFoundError
from storage.keys import KeyTable, KeyTableWriter, SortedHashes, hash_key


def write_table(folder: Path, keys: list[bytes], hashes: list[int]) -> KeyTable:
    writer = KeyTableWriter(folder / "spool")
    for key, key_hash in zip(keys, hashes):
        assert writer.find(key, key_hash) is None
        writer.add(key, key_hash)
    for row, (key, key_hash) in enumerate(zip(keys, hashes)):
        assert writer.find(key, key_hash) == row
    no_blob = np.full(len(keys), -1)
    writer.write(folder / "keys.arrow", no_blob, np.zeros(len(keys), np.int64), bytes(16 * len(keys)))
    writer.close()
    return KeyTable(np.fromfile(folder / "keys.arrow", np.uint8))


@pytest.mark.parametrize("count", [1, 7, 16, 4097, 70_000])
def test_every_key_is_found_and_no_other(tmp_path: Path, count: int) -> None:
    keys = [f"schlüssel-{number}".encode() for number in range(count)]
    table = write_table(tmp_path, keys, [hash_key(key) for key in keys])
    assert [table.find(key, hash_key(key)) for key in keys] == list(range(count))
    others = [f"other-{number}".encode() for number in range(count)]
    assert {table.find(key, hash_key(key)) for key in others} == {None}
    assert table.encoded_key(count - 1) == keys[-1]


def test_keys_with_one_hash_are_told_apart(tmp_path: Path) -> None:
    keys = [b"a", b"b", b"c", b"d" * 600]
    table = write_table(tmp_path, keys, [7, 7, 1 << 63, 7])
    assert [table.find(key, 7) for key in keys] == [0, 1, None, 3]
    assert table.find(b"c", 1 << 63) == 2
    assert table.find(b"e", 7) is None


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
@pytest.mark.parametrize("high", [5, 1 << 20, 1 << 64])
def test_search_among_hashes_equals_numpy(count: int, high: int) -> None:
    rng = np.random.default_rng(count)
    hashes = np.sort(rng.integers(0, high, count, dtype=np.uint64, endpoint=False))
    ends = np.array([0, 2**64 - 1], np.uint64)
    wanted = np.concatenate([hashes, rng.integers(0, high, 50, dtype=np.uint64), ends])
    found = [SortedHashes(hashes).first(value) for value in wanted.tolist()]
    assert found == hashes.searchsorted(wanted).tolist()


@pytest.mark.parametrize("large_rows", [1, 40, 1 << 20])
def test_a_key_is_found_in_parts_of_any_kind(
    empty: FeatureStore, monkeypatch: pytest.MonkeyPatch, large_rows: int
) -> None:
    monkeypatch.setattr("storage.key_index._LARGE_ROWS", large_rows)
    monkeypatch.setattr("storage.key_index._SLICE_KEYS", 30)
    store = empty
    for first, stop in ((0, 100), (100, 110), (110, 120), (120, 180), (180, 185)):
        store.append({"key": f"k{number}", "width": number} for number in range(first, stop))
        store = store.refresh()
        assert [store.row(f"k{number}") for number in range(stop)] == list(range(stop))
    store.delete("width % 7 = 0")
    store.refresh().compact()
    store = FeatureStore.open(store.path)
    store.append({"key": f"k{number}", "width": -1} for number in range(0, 185, 7))
    again = {f"k{number}": 185 + at for at, number in enumerate(range(0, 185, 7))}
    store = store.refresh()
    assert {f"k{n}": store.row(f"k{n}") for n in range(185)} == {f"k{n}": n for n in range(185)} | again
    with pytest.raises(KeyNotFoundError, match="k185"):
        store.row("k185")


def test_many_commits_leave_few_directories(empty: FeatureStore) -> None:
    store = empty
    for number in range(70):
        store.append([{"key": f"k{number}"}])
        store = store.refresh()
        assert store.row(f"k{number // 2}") == number // 2
    index = store._key_index
    assert index is not None and len(index._runs) <= 7
    assert [store.row(f"k{number}") for number in range(70)] == list(range(70))
