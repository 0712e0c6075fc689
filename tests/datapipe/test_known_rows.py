"""Keys and contents that a store has already."""

from __future__ import annotations

from pathlib import Path

from datapipe.identity import content_id
from datapipe.known_rows import KnownRows, place_of_row
from storage import FeatureStore


def test_rows_of_several_commits_are_found(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    for start in (0, 50):
        store.append(
            {"key": f"k{i}", "blob": b"%d" % i, "source": "s", "place": f"p{i}", "caption": f"c{i}"}
            for i in range(start, start + 50)
        )
    store = store.refresh()
    known = KnownRows(store)
    row = known.find("k77")
    assert row is not None and (row.source, row.place, row.caption) == ("s", "p77", "c77")
    assert row.full_place == "p77 of s" == place_of_row(store, "k77")
    assert known.find("k100") is None
    assert row.hash is not None and content_id(row.hash, "c77") in known.contents
    assert (
        content_id(row.hash, "c77", 0) not in known.contents
        and content_id(row.hash, "c78") not in known.contents
    )
    assert len(known.contents) == 100


def test_stores_without_rows_or_without_our_columns(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    assert KnownRows(store).find("a") is None
    store.append([{"key": "a"}])
    row = KnownRows(store.refresh()).find("a")
    assert row is not None and (row.source, row.place, row.caption, row.hash) == (None, None, None, None)
