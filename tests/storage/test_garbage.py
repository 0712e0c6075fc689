from __future__ import annotations

import pytest

from storage import FeatureStore, ManifestError


def test_orphans_go_and_everything_listed_stays(filled, codes_of):
    part_id = filled.snapshot.parts[0].id
    orphans = [
        "index/part-dead.parquet",
        "index/part-dead.keys.arrow",
        "blobs/dead/data.mdb",
        "tensors/codes/dead.arrow",
        "quarantine/part-dead.parquet",
        "staging/dead/writer.lock",
        "staging/dead/blobs/data.mdb",
        "staging/snapshot-dead.json",
        f"tensors/codes/{part_id}-dead.arrow",
    ]
    for name in orphans:
        path = filled.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1234")
    assert filled.gc().removed == []
    report = filled.gc(grace_s=0)
    assert report.removed == sorted(orphans) and report.bytes == 4 * len(orphans)
    assert not (filled.path / "blobs" / "dead").exists() and not (filled.path / "staging" / "dead").exists()
    assert filled.verify().ok and FeatureStore.open(filled.path, snapshot=1).verify().ok


def test_a_live_writer_keeps_its_files(filled, codes_of):
    with filled.writer() as writer:
        writer.add("slow", b"1" * 100_000, {"codes": codes_of(1)}, width=1)
        assert filled.gc(grace_s=0).removed == []
    assert filled.refresh().blob(100) == b"1" * 100_000

    def compute(view):
        assert filled.gc(grace_s=0).removed == []
        return view.rows

    filled.add_column("n", compute, dtype="int64", shape=())
    assert filled.gc(grace_s=0).removed == []
    assert filled.refresh().verify().ok


def test_nothing_is_removed_while_a_snapshot_cannot_be_read(filled):
    (filled.path / "snapshots" / "00000001.json").write_bytes(b"{")
    (filled.path / "index" / "part-dead.parquet").write_bytes(b"")
    with pytest.raises(ManifestError, match="00000001"):
        filled.gc(grace_s=0)
    assert (filled.path / "index" / "part-dead.parquet").exists()
