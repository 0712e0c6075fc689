from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from storage import (
    ColumnTypeError,
    CommitConflictError,
    DuplicateKeyError,
    FeatureStore,
    ManifestError,
    MissingShardError,
    SealedPart,
    TensorColumnError,
)


def seal(store: FeatureStore, *rows: dict, **options) -> SealedPart:
    with store.part_writer(**options) as writer:
        for row in rows:
            writer.add(**row)
    assert writer.sealed is not None
    return writer.sealed


WORKER = """
import sys
import numpy as np
from storage import FeatureStore
start = int(sys.argv[2])
with FeatureStore.open(sys.argv[1]).part_writer(tensors={"x": ("float32", (2,))}) as writer:
    for i in range(start, start + 5):
        writer.add(f"k{i}", b"blob %d" % i, {"x": np.array([i, -i], np.float32)}, n=i)
    writer.quarantine(key=f"bad{start}", place=f"file {start}", reason="truncated", data=b"?")
print(writer.sealed.to_json())
"""


def test_parts_of_several_processes_are_one_snapshot(empty):
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(empty.path), str(start)], stdout=subprocess.PIPE, text=True
        )
        for start in (0, 5, 10)
    ]
    records = [worker.communicate(timeout=60)[0] for worker in workers]
    assert FeatureStore.open(empty.path).snapshot.id == 0
    snapshot = empty.publish_parts(map(SealedPart.from_json, records), "three workers")
    store = empty.refresh()
    assert (snapshot.id, snapshot.message, len(snapshot.parts), snapshot.num_rows) == (
        1,
        "three workers",
        3,
        15,
    )
    assert store.select().keys() == [f"k{i}" for i in range(15)]
    assert [bytes(store.blob(row)) for row in range(15)] == [b"blob %d" % i for i in range(15)]
    assert store.tensor("x").gather(np.arange(15))[:, 1].tolist() == [-i for i in range(15)]
    assert store.quarantined().column("key").to_pylist() == ["bad0", "bad5", "bad10"]
    assert store.verify().ok and not list((store.path / "staging").iterdir())
    assert store.gc(grace_s=0).removed == []


def test_the_record_is_text_that_survives_json(filled):
    part = seal(filled, {"key": "a", "blob": b"1", "n": 1}, {"key": "b"})
    assert len(part) == 2
    text = json.loads(json.dumps({"part": part.to_json()}))["part"]
    assert SealedPart.from_json(text) == part


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"sealed": "../x", "content": ""}', '{"sealed": 1}'])
def test_a_record_of_something_else_is_refused(text):
    with pytest.raises(ManifestError, match="not the record of a sealed part"):
        SealedPart.from_json(text)


def test_an_altered_record_is_refused(empty):
    record = seal(empty, {"key": "a", "blob": b"1"}).to_json()
    for old, new in (("blobs/", "../bs/"), ('num_rows\\": 1', 'num_rows\\": 2')):
        assert old in record
        with pytest.raises(ManifestError, match="checksum"):
            SealedPart.from_json(record.replace(old, new))


def test_nothing_of_a_failed_block_remains(filled):
    before = sorted(filled.path.rglob("*"))
    with pytest.raises(ZeroDivisionError), filled.part_writer() as writer:
        writer.add("a", b"1")
        raise ZeroDivisionError
    assert writer.sealed is None and sorted(filled.path.rglob("*")) == before


def test_duplicate_keys_are_refused_with_both_places(filled):
    one, two = seal(filled, {"key": "a"}, {"key": "b"}), seal(filled, {"key": "c"}, {"key": "b"})
    with pytest.raises(
        DuplicateKeyError, match=f"row 1 of part {two.id}, key 'b': row 1 of part {one.id} has"
    ):
        filled.publish_parts([one, two])
    filled.append([{"key": "c"}])
    with pytest.raises(DuplicateKeyError, match=f"row 0 of part {two.id}, key 'c'.*row 100 of .*snapshot 3"):
        filled.publish_parts([two])
    assert filled.refresh().snapshot.id == 3
    filled.publish_parts([one])
    assert filled.refresh().select().keys()[-3:] == ["c", "a", "b"]
    with pytest.raises(DuplicateKeyError, match=r"row 5 of .*snapshot 4"):
        seal(filled, {"key": "k00005"})


def test_a_key_whose_row_came_back_is_refused(filled):
    filled.delete("key = 'k00005'")
    part = seal(filled, {"key": "k00005"})
    filled.restore(2)
    with pytest.raises(DuplicateKeyError, match="row 5"):
        filled.publish_parts([part])
    filled.delete("key = 'k00005'")
    filled.publish_parts([part])
    assert filled.refresh().row("k00005") == 100


def test_columns_that_do_not_fit_are_refused(filled):
    whole, text = seal(filled, {"key": "a", "n": 1}), seal(filled, {"key": "b", "n": "x"})
    with pytest.raises(
        ColumnTypeError, match=f"part {text.id}: column 'n' is string, but int since part {whole.id}"
    ):
        filled.publish_parts([whole, text])
    small = seal(filled, {"key": "c", "tensors": {"y": np.zeros(2)}})
    large = seal(filled, {"key": "d", "tensors": {"y": np.zeros(3)}})
    with pytest.raises(TensorColumnError, match=r"'y' is float64\(3,\) in part"):
        filled.publish_parts([small, large])
    filled.publish_parts([whole, small, seal(filled, {"key": "e", "n": None})])
    assert filled.refresh().snapshot.columns["n"].since == whole.id
    assert filled.refresh().verify().ok


def test_a_part_is_published_once(filled):
    part = seal(filled, {"key": "a"})
    with pytest.raises(CommitConflictError, match="given twice"):
        filled.publish_parts([part, part])
    filled.publish_parts([part])
    with pytest.raises(CommitConflictError, match="published already"):
        filled.publish_parts([part])
    assert len(filled.refresh()) == 101


def test_empty_parts_publish_nothing(filled):
    assert filled.publish_parts([]).id == 2
    assert filled.publish_parts([seal(filled)]).id == 2
    assert not list((filled.path / "staging").iterdir())


def test_gc_waits_for_the_grace_period(filled):
    kept, lost = seal(filled, {"key": "a", "blob": b"1"}), seal(filled, {"key": "b", "blob": b"2"})
    assert filled.gc().removed == []
    filled.publish_parts([kept])
    assert {lost.id in name for name in filled.gc(grace_s=0).removed} == {True}
    with pytest.raises(MissingShardError, match="the shard is missing"):
        filled.publish_parts([lost])
    assert not list((filled.path / "staging").iterdir()) and filled.refresh().verify().ok


def test_gc_waits_for_a_publisher(filled, monkeypatch):
    from storage import sealed

    part = seal(filled, {"key": "a", "blob": b"1"})
    script = f"from storage import FeatureStore; print(FeatureStore.open({str(filled.path)!r}).gc(grace_s=0))"
    collectors = []

    def publish(*arguments):
        monkeypatch.undo()
        collectors.append(subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True))
        with pytest.raises(subprocess.TimeoutExpired):
            collectors[0].wait(1)
        return sealed.publish(*arguments)

    monkeypatch.setattr(sealed, "publish", publish)
    filled.publish_parts([part])
    assert "removed=[]" in collectors[0].communicate(timeout=60)[0]
    assert filled.refresh().verify().ok


def test_a_missing_shard_is_found_before_publishing(filled):
    part = seal(filled, {"key": "a", "blob": b"1"})
    blobs = part.content.parts[0].blobs
    os.truncate(filled.path / blobs.path, 4096)
    with pytest.raises(Exception, match="has 4096 bytes"):
        filled.publish_parts([part])
    assert filled.refresh().snapshot.id == 2
