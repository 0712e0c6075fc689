"""Files that are as they were written, but do not say the same: what only a comparison finds."""

from __future__ import annotations

import json
from dataclasses import replace

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from storage import FeatureStore
from storage.manifest_json import encode_snapshot


def forge(store: FeatureStore, part: int, **files) -> FeatureStore:
    """Put other content under the names of files of a part, and their checksums into the snapshot."""
    changed = {}
    for name, content in files.items():
        ref = getattr(store.snapshot.parts[part], name)
        path = store.path / ref.path
        path.chmod(0o644)
        path.write_bytes(content)
        changed[name] = replace(ref, bytes=len(content), xxh3=xxhash.xxh3_128_hexdigest(content))
    parts = list(store.snapshot.parts)
    parts[part] = replace(parts[part], **changed)
    number = store.snapshot.id + 1
    snapshot = replace(store.snapshot, id=number, parent=number - 1, parts=tuple(parts))
    (store.path / "snapshots" / f"{number:08d}.json").write_bytes(encode_snapshot(snapshot))
    return FeatureStore.open(store.path)


def forged_index(store: FeatureStore, part: int, column: str, row: int, value: object) -> bytes:
    table = pq.read_table(store.path / store.snapshot.parts[part].index.path)
    values = table[column].to_pylist()
    values[row] = value
    at = table.schema.get_field_index(column)
    table = table.set_column(at, column, pa.array(values, table.schema.field(at).type))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("key", "other", "row 7 of the part has key 'other', its key table says 'k00007'"),
        ("hash", "0" * 32, f"row 7 of the part has hash '{'0' * 32}', its key table says"),
        ("bytes", None, "row 7 of the part has bytes None, its key table says 260"),
    ],
)
def test_an_index_that_differs_from_the_key_table(filled, column, value, text):
    store = forge(filled, 0, index=forged_index(filled, 0, column, 7, value))
    (problem,) = store.verify().problems
    assert problem.path == store.snapshot.parts[0].index.path and text in problem.text


def test_an_index_of_too_few_rows_or_columns(filled):
    table = pq.read_table(filled.path / filled.snapshot.parts[0].index.path)
    for changed, text in (
        (table.slice(1), "59 rows, the snapshot says 60"),
        (table.drop_columns("hash"), "no column"),
    ):
        sink = pa.BufferOutputStream()
        pq.write_table(changed, sink)
        (problem,) = forge(filled, 0, index=sink.getvalue().to_pybytes()).verify().problems
        assert text in problem.text


def test_row_numbers_that_differ(filled):
    filled.delete("width in (3, 70)")
    filled.compact()
    store = filled.refresh()
    store = forge(store, 0, index=forged_index(store, 0, "row", 5, 5))
    assert "row 5 of the part has row 5, its key table says 6" in store.verify().problems[0].text


def test_a_key_of_two_parts(filled, filler):
    other = filler(FeatureStore.create(filled.path.with_name("other")), 0, 60)
    files = {
        name: (other.path / getattr(other.snapshot.parts[0], name).path).read_bytes()
        for name in ("index", "keys", "blobs")
    }
    store = forge(filler(filled, 100, 160), 2, **files)
    problems = store.verify().problems
    assert len(problems) == 60
    assert "row 100 has the key 'k00000' of row 0" in {problem.text for problem in problems}
    store.delete("row >= 100")
    assert store.refresh().verify().ok


def test_a_deep_check_finds_what_lmdb_finds(filled):
    assert filled.verify(deep={}).ok
    path = filled.path / filled.snapshot.parts[0].blobs.path
    path.chmod(0o644)
    with (
        lmdb.open(str(path.parent), map_size=1 << 30, lock=False) as env,
        env.begin(write=True) as transaction,
    ):
        transaction.put(b"stray", b"1")
        transaction.delete(b"k00009")
        transaction.put(b"k00001", b"changed")
    store = forge(filled, 0, blobs=path.read_bytes())
    texts = " | ".join(problem.text for problem in store.verify(deep={}).problems)
    assert "no entry for key 'k00009'" in texts
    assert "other bytes for key 'k00001'" in texts or "blob of key 'k00001'" in texts


def test_a_shared_blob_needs_the_entry_of_its_first_row(empty):
    empty.append([{"key": key, "blob": b"the same" * 9} for key in ("a", "b", "c")])
    store = empty.refresh()
    assert store.verify(deep={}).ok
    path = store.path / store.snapshot.parts[0].blobs.path
    path.chmod(0o644)
    with lmdb.open(str(path.parent), map_size=1 << 30, lock=False) as env, env.begin(write=True) as writing:
        writing.delete(b"a")
    store = forge(store, 0, blobs=path.read_bytes())
    texts = " | ".join(problem.text for problem in store.verify(deep={}).problems)
    assert all(f"no entry for key '{key}'" in texts for key in "abc")


def test_decoders_by_modality_and_for_all(empty):
    empty.append(
        [
            {"key": "a", "blob": b"good", "modality": "image+text"},
            {"key": "b", "blob": b"bad", "modality": "image"},
            {"key": "c", "blob": b"bad", "modality": "audio"},
            {"key": "d", "modality": "image"},
            {"key": "e", "blob": b"bad", "modality": None},
        ]
    )
    empty.refresh().append([{"key": "f", "blob": b"bad"}])
    store = empty.refresh()

    def decode(blob):
        if bytes(blob) == b"bad":
            raise ValueError("not good")

    report = store.verify(deep={"image": decode})
    assert (report.decoded, [p.text for p in report.problems]) == (
        2,
        ["row 1, key 'b', does not decode: not good"],
    )
    report = store.verify(deep=decode)
    assert report.decoded == 5 and len(report.problems) == 4
    store.delete("key != 'a'")
    assert store.refresh().verify(deep=decode).ok


def test_the_report_is_json_and_progress_is_told(filled):
    seen = []
    report = filled.verify(deep={}, progress=lambda done, total: seen.append((done, total)))
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    blobs = sum(part.blobs.bytes for part in filled.snapshot.parts)
    assert seen[-1] == (report.bytes + blobs, report.bytes + blobs) and seen == sorted(seen)


def test_a_key_table_whose_search_index_is_wrong(filled):
    table = (
        pa.ipc.open_file(str(filled.path / filled.snapshot.parts[0].keys.path)).read_all().combine_chunks()
    )
    rows = np.roll(table["sorted_row"].to_numpy(), 1)
    table = table.set_column(5, table.schema.field(5), pa.array(rows))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    store = forge(filled, 0, keys=sink.getvalue().to_pybytes())
    assert store.verify().ok
    assert "stands beside the row of another key" in store.verify(deep={}).problems[0].text
