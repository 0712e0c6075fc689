from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from storage import (
    CommitConflictError,
    FeatureStore,
    ManifestError,
    StorageError,
    StoreNotFoundError,
    repair_store,
)


def flip(path: Path, offset: int) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def flip_blob(store: FeatureStore, part: int, row: int) -> None:
    keys = store.part(part).keys("never")
    assert keys.blob_bytes[row] > 0
    flip(store.path / store.snapshot.parts[part].blobs.path, int(keys.blob_offset[row]))


def same_rows(store: FeatureStore, blob_of, codes_of, gone=()) -> None:
    """All rows but those that are gone, as they were filled in."""
    wanted = [i for i in range(100) if i not in gone]
    rows = store.select().rows
    assert rows.tolist() == wanted
    table = store.select().to_arrow(["key", "caption", "width"]).to_pylist()
    assert [row["key"] for row in table] == [f"k{i:05d}" for i in wanted]
    assert [row["width"] for row in table] == wanted
    assert [bytes(store.blob(i)) for i in wanted] == [blob_of(i) for i in wanted]
    assert np.array_equal(store.tensor("codes").gather(rows), np.stack([codes_of(i) for i in wanted]))
    assert [store.row(f"k{i:05d}") for i in wanted[::7]] == wanted[::7]


def repaired(store: FeatureStore) -> tuple:
    """The report, and the store after the repair, which has to be whole."""
    before = sorted(path for path in store.path.rglob("*"))
    plan = repair_store(store.path, dry_run=True)
    assert sorted(path for path in store.path.rglob("*")) == before and plan.snapshot is None
    report = repair_store(store.path)
    assert (report.lost, report.missing, report.broken) == (plan.lost, plan.missing, plan.broken)
    folder = store.path / report.folder
    assert all((folder / name).is_file() and not (store.path / name).exists() for name in report.moved)
    lines = [json.loads(line) for line in (folder / "lost_keys.jsonl").read_text().splitlines()]
    assert [(line["key"], line["row"]) for line in lines] == [(row.key, row.row) for row in report.lost]
    assert json.loads((folder / "report.json").read_text())["snapshot"] == report.snapshot
    after = FeatureStore.open(store.path)
    check = after.verify(deep={})
    assert check.ok, check.problems
    assert after.snapshot.id == report.snapshot and not list((store.path / "staging").iterdir())
    assert repair_store(store.path).is_whole
    after.gc(grace_s=0)
    assert all((folder / name).is_file() for name in report.moved)
    return report, after


def test_nothing_is_done_to_a_whole_store(filled):
    report = filled.repair()
    assert report.is_whole and report.snapshot is None and report.folder is None
    assert filled.refresh().snapshot.id == 2 and not (filled.path / "broken").exists()


def test_of_a_broken_blob_file_only_what_is_damaged_is_lost(filled, blob_of, codes_of):
    for row in (7, 41):
        flip_blob(filled, 0, row)
    report, store = repaired(filled)
    assert [row.key for row in report.lost] == ["k00007", "k00041"] and "do not match" in report.lost[
        0
    ].reason
    same_rows(store, blob_of, codes_of, gone=(7, 41))
    refused = store.quarantined().to_pylist()
    assert [row["key"] for row in refused] == ["k00007", "k00041"] and refused[0]["reason"].startswith(
        "damaged: "
    )
    store.append([{"key": "k00007", "blob": b"again"}])
    assert len(store.refresh()) == 99


def test_damage_outside_of_all_blobs_loses_nothing(filled, blob_of, codes_of):
    flip(filled.path / filled.snapshot.parts[0].blobs.path, 20)
    report, store = repaired(filled)
    assert report.lost == [] and len(report.moved) == 1
    same_rows(store, blob_of, codes_of)


def test_a_blob_file_that_was_cut_short_or_is_gone(filled, blob_of, codes_of):
    path = filled.path / filled.snapshot.parts[0].blobs.path
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    report, store = repaired(filled)
    lost = [row.row for row in report.lost]
    assert 0 < len(lost) < 60
    same_rows(store, blob_of, codes_of, gone=lost)
    (store.path / store.snapshot.parts[1].blobs.path).unlink()
    report, store = repaired(store)
    assert len(report.lost) == 40 and report.moved == () and "missing" in report.lost[0].reason
    same_rows(store, blob_of, codes_of, gone=[*lost, *range(60, 100)])


def test_a_key_table_is_made_anew(filled, blob_of, codes_of):
    path = filled.path / filled.snapshot.parts[1].keys.path
    flip(path, path.stat().st_size // 2)
    report, store = repaired(filled)
    assert report.lost == [] and report.moved == (filled.snapshot.parts[1].keys.path,)
    same_rows(store, blob_of, codes_of)


def test_rows_of_a_broken_index_go_to_the_quarantine(filled, blob_of, codes_of):
    flip(filled.path / filled.snapshot.parts[0].index.path, 100)
    report, store = repaired(filled)
    assert len(report.lost) == 60 and "metadata is lost" in report.lost[0].reason
    same_rows(store, blob_of, codes_of, gone=range(60))
    refused = store.quarantined().to_pylist()
    assert [row["key"] for row in refused] == [f"k{i:05d}" for i in range(60)]
    assert [row["data"] for row in refused] == [blob_of(i) for i in range(60)]


def test_index_and_keys_broken(filled, blob_of, codes_of):
    part = filled.snapshot.parts[0]
    (filled.path / part.index.path).unlink()
    flip(filled.path / part.keys.path, 600)
    report, store = repaired(filled)
    assert [(row.key, row.row) for row in report.lost] == [(None, i) for i in range(60)]
    same_rows(store, blob_of, codes_of, gone=range(60))


def test_keys_and_blobs_broken(filled, blob_of, codes_of):
    flip(filled.path / filled.snapshot.parts[0].keys.path, 600)
    flip_blob(filled, 0, 5)
    report, store = repaired(filled)
    assert len(report.lost) == 60 and report.lost[5].key == "k00005"
    same_rows(store, blob_of, codes_of, gone=range(60))


def test_of_a_broken_tensor_file_the_whole_blocks_are_kept(empty):
    data = np.random.default_rng(0).random((600, 512), np.float32)
    empty.append(
        {"key": str(i), "blob": b"x", "tensors": {"x": row, "y": row[:1]}} for i, row in enumerate(data)
    )
    store = empty.refresh()
    file = store.snapshot.parts[0].tensors["x"]
    flip(store.path / file.path, file.offset + 300 * 2048 + 5)
    report, after = repaired(store)
    assert report.lost == [] and report.missing == {"x": 128} and report.moved == (file.path,)
    has = after.tensor("x").has(after.select().rows)
    assert np.flatnonzero(~has).tolist() == list(range(256, 384))
    assert np.array_equal(after.tensor("x").gather(np.flatnonzero(has)), data[has])
    assert np.array_equal(after.tensor("y")[0:600][:, 0], data[:, 0])
    assert after.snapshot.parts[0].id == store.snapshot.parts[0].id
    present = after.snapshot.parts[0].tensors["x"].present
    flip(after.path / present.path, present.bytes // 2)
    report, last = repaired(after)
    assert report.missing == {"x": 472} and not last.tensor("x").has(last.select().rows).any()
    last.add_column("x", lambda view: data[view.rows], dtype="float32", shape=(512,))
    assert np.array_equal(last.refresh().tensor("x")[0:600], data)


@pytest.mark.parametrize("sparse", [False, True])
def test_damage_outside_of_all_values_loses_none(filled, sparse, blob_of, codes_of):
    if sparse:
        filled.add_column(
            "half", lambda view: (view.rows % 2 == 0, view.rows[::2]), dtype="int64", shape=(), sparse=True
        )
    store = filled.refresh()
    file = store.snapshot.parts[0].tensors["half" if sparse else "codes"]
    flip(store.path / file.path, file.offset - 20)
    report, after = repaired(store)
    assert (report.lost, report.missing, report.moved) == ([], {}, (file.path,))
    same_rows(after, blob_of, codes_of)
    if sparse:
        assert np.array_equal(after.tensor("half").gather(np.arange(0, 100, 2)), np.arange(0, 100, 2))


def test_a_tensor_file_that_is_gone_is_missing_values(filled):
    (filled.path / filled.snapshot.parts[0].tensors["codes"].path).unlink()
    report, store = repaired(filled)
    assert report.lost == [] and report.missing == {"codes": 60} and len(store) == 100
    assert store.tensor("codes").has(store.select().rows).sum() == 40


def test_compacted_parts_and_deleted_rows(filled, blob_of, codes_of):
    filled.delete("width in (3, 50, 70)")
    filled.compact()
    store = filled.refresh()
    store.delete("width = 20")
    store = store.refresh()
    flip(store.path / store.snapshot.parts[0].row_ids.path, 500)
    flip_blob(store, 0, 30)
    report, after = repaired(store)
    assert [row.row for row in report.lost] == [31] and len(report.moved) == 2
    same_rows(after, blob_of, codes_of, gone=(3, 20, 31, 50, 70))


def test_the_list_of_deleted_rows(filled, blob_of, codes_of):
    filled.delete("width = 3")
    filled.delete("width in (4, 5)")
    path = filled.path / filled.refresh().snapshot.deleted.path
    flip(path, path.stat().st_size // 2)
    with pytest.raises(StorageError):
        FeatureStore.open(filled.path).verify()
    report, store = repaired(filled)
    assert "that of snapshot 3 was taken, so that up to 2 rows" in report.notes[0]
    same_rows(store, blob_of, codes_of, gone=(3,))


@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_a_newest_snapshot_that_cannot_be_read(filled, filler, blob_of, codes_of, content):
    newest = filler(filled, 100, 103)
    path = newest.path / "snapshots" / "00000003.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-40] if content is None else content)
    with pytest.raises(ManifestError):
        FeatureStore.open(filled.path)
    report, store = repaired(filled)
    assert (report.damaged_snapshots, report.restored, report.snapshot) == ((3,), 2, 4)
    assert "snapshot 2 stands in for it" in report.notes[0] and store.snapshot.parent == 2
    same_rows(store, blob_of, codes_of)
    assert [s.id for s in store.log()] == [4, 2, 1, 0]


def test_an_old_snapshot_that_cannot_be_read_is_put_aside(filled, blob_of, codes_of):
    (filled.path / "snapshots" / "00000001.json").chmod(0o644)
    (filled.path / "snapshots" / "00000001.json").write_bytes(b"no")
    report, store = repaired(filled)
    assert (report.damaged_snapshots, report.restored, report.snapshot) == ((1,), None, 3)
    same_rows(store, blob_of, codes_of)


def test_what_cannot_be_repaired(tmp_path, empty):
    with pytest.raises(StoreNotFoundError):
        repair_store(tmp_path / "none")
    path = empty.path / "snapshots" / "00000000.json"
    path.chmod(0o644)
    path.write_bytes(b"")
    with pytest.raises(ManifestError, match="none of 1 snapshots can be read"):
        repair_store(empty.path)


def test_another_writer_meanwhile(filled, filler, monkeypatch):
    from storage.repair import repairing

    flip_blob(filled, 0, 7)
    original = repairing.mend

    def race(change):
        def mend(*arguments):
            change()
            return original(*arguments)

        monkeypatch.setattr(repairing, "mend", mend)

    race(lambda: filled.delete("width = 90"))
    with pytest.raises(CommitConflictError, match="repair again"):
        filled.repair()
    race(lambda: filler(filled, 100, 105))
    report = filled.repair()
    store = filled.refresh()
    assert len(report.lost) == 1 and len(store) == 103 and store.verify().ok
