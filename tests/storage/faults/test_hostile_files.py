"""Files made to do harm: each is refused with an error of the store, in time, before it is mapped."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from storage import FeatureStore, ManifestError, StorageError
from storage.manifest_json import decode_snapshot


@pytest.fixture(autouse=True)
def in_time():
    """A read that waits for ever is a failure, not a hanging test."""

    def give_up(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def newest_file(path: Path) -> Path:
    return max((path / "snapshots").iterdir())


def signed(body: bytes) -> bytes:
    return body + b',\n"checksum": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


def rewrite(path: Path, change) -> None:
    """Alter the newest snapshot and give it a right checksum, as an attacker would."""
    fields = json.loads(newest_file(path).read_bytes())
    del fields["checksum"]
    change(fields)
    newest_file(path).write_bytes(signed(json.dumps(fields).encode()[:-1]))


def read_all(store: FeatureStore) -> None:
    """Each way to the files of a store."""
    store.blob(3)
    store.tensor("x")[0:3]
    store.tensor("x").gather(np.array([1, 22]))
    store.key(2)
    store.row("k3")
    store.select("number = 3")
    store.select().column("split")
    store.quarantined()


IN_PLACE_OF_A_FILE = {
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a file": lambda path: path.symlink_to("/etc/passwd"),
    "a terabyte of zeros": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}


@pytest.mark.parametrize("what", IN_PLACE_OF_A_FILE)
def test_anything_in_place_of_the_newest_snapshot(copy, what):
    IN_PLACE_OF_A_FILE[what](copy / "snapshots" / "00000004.json")
    for act in (FeatureStore.open, lambda path: FeatureStore.open(path, snapshot=4)):
        with pytest.raises(StorageError, match=r"00000004\.json"):
            act(copy)
    store = FeatureStore.open(copy, snapshot=3)
    read_all(store)
    for act in (store.refresh, store.gc, lambda: store.append([{"key": "new"}]), store.snapshots):
        with pytest.raises(StorageError, match=r"00000004\.json"):
            act()
    assert not store.verify().ok


@pytest.mark.parametrize("what", IN_PLACE_OF_A_FILE)
def test_anything_in_place_of_a_tag(copy, what):
    IN_PLACE_OF_A_FILE[what](copy / "tags" / "bad.json")
    store = FeatureStore.open(copy)
    for act in (store.tags, lambda: store.at("bad"), lambda: store.gc(grace_s=0, keep_last=1)):
        with pytest.raises(StorageError, match=r"bad\.json"):
            act()
    read_all(store.at("v1"))


@pytest.mark.parametrize(
    "content",
    ["", "[" * 100_000, '{"snapshot": 1e999}', '{"snapshot": NaN}', '{"snapshot": "1"}', '{"snapshot": true}',
     '{"snapshot": -1}', '{"snapshot": 1.0}', '{"snapshot": null}', "[]", "7", "\0" * 100, '{"snapshot": []}',
     '{"snapshot": ' + "9" * 5000 + "}"],
)  # fmt: skip
def test_a_damaged_tag(copy, content):
    (copy / "tags" / "bad.json").write_text(content, encoding="utf-8")
    with pytest.raises(ManifestError, match=r"bad\.json"):
        FeatureStore.open(copy).tags()


FILES = ["index/*.parquet", "index/*.keys.arrow", "blobs/*/data.mdb", "tensors/x/*.arrow", "quarantine/*",
         "index/deleted-*"]  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("what", IN_PLACE_OF_A_FILE)
def test_anything_in_place_of_a_shard(copy, kind, what):
    for path in copy.glob(kind):
        path.unlink()
        IN_PLACE_OF_A_FILE[what](path)
    with pytest.raises(StorageError):
        read_all(FeatureStore.open(copy))
    if "deleted" not in kind:
        assert not FeatureStore.open(copy).verify().ok


@pytest.mark.parametrize("folder", ["index", "blobs", "tensors", "tensors/x"])
def test_a_linked_folder_is_neither_read_nor_written_through(copy, tmp_path, folder):
    shutil.move(copy / folder, tmp_path / "elsewhere")
    (copy / folder).symlink_to(tmp_path / "elsewhere")
    before = set((tmp_path / "elsewhere").rglob("*"))
    with pytest.raises(StorageError, match="symbolic link"):
        read_all(FeatureStore.open(copy, snapshot=2))
    row = {"key": "new", "blob": b"1", "tensors": {"x": np.zeros(4, np.int32)}}
    with pytest.raises(StorageError, match="symbolic link"):
        FeatureStore.open(copy, snapshot=2).append([row])
    assert set((tmp_path / "elsewhere").rglob("*")) == before
    assert max(int(path.stem) for path in (copy / "snapshots").iterdir()) == 3


def _huge_rows(fields: dict) -> None:
    part = fields["parts"][0]
    fields.update(parts=[part], tensors={}, deleted=None, num_rows=1 << 58, next_row=1 << 58)
    part.update(rows=1 << 58, end_row=1 << 58, tensors={})
    for name in ("index", "keys", "blobs"):
        part[name]["rows"] = 1 << 58


def _twice(fields: dict) -> None:
    fields["parts"].append({**fields["parts"][0], "first_row": 30, "end_row": 50})
    fields.update(num_rows=49, next_row=50)


MANIFESTS = {
    "more rows than fit the key table": _huge_rows,
    "the same part twice": _twice,
    "too many axes": lambda f: f["tensors"]["x"].update(shape=[1] * 100 + [4]),
    "a shape that overflows": lambda f: f["tensors"].update(z={"dtype": "int8", "shape": [1 << 59, 1 << 59]}),
    "a shape that overflows 2^64 to zero": lambda f: f["tensors"].update(
        z={"dtype": "int64", "shape": [1 << 32, 1 << 32]}
    ),
    "the other byte order": lambda f: f["tensors"]["x"].update(dtype=">i4"),
    "a dtype that is no name": lambda f: f["tensors"]["x"].update(dtype="i"),
    "an empty dtype": lambda f: f["tensors"]["x"].update(dtype="\0"),
    "a dtype that is a program": lambda f: f["tensors"]["x"].update(dtype="[('a', 'f4')]"),
    "a column named row": lambda f: f["columns"].update(row={"type": "int", "since": "x"}),
    "columns that SQL cannot tell apart": lambda f: f["columns"].update(Split=f["columns"]["split"]),
    "a column without a name": lambda f: f["columns"].update({"": f["columns"]["split"]}),
    "a column with NUL": lambda f: f["columns"].update({"a\0b": f["columns"]["split"]}),
    "a column that is no text": lambda f: f["columns"].update({"\ud800": f["columns"]["split"]}),
    "a size as float": lambda f: f["parts"][0]["blobs"].update(bytes=12.0),
    "a negative size": lambda f: f["parts"][0]["keys"].update(bytes=-5),
    "a size of 2^63": lambda f: f["parts"][0]["index"].update(bytes=2**63),
    "a long text in place of a number": lambda f: f.update(num_rows="9" * 1_000_000),
    "an absolute path": lambda f: f["deleted"].update(path="/etc/passwd"),
    "a path upwards": lambda f: f["quarantine"][0].update(path="quarantine/../../x"),
    "deleted rows beyond all": lambda f: f["deleted"].update(rows=31),
    "a list in place of an object": lambda f: f.update(tensors=[]),
    "nested lists": lambda f: f.update(message=[[[[]]]]),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_refused(copy, name):
    rewrite(copy, MANIFESTS[name])
    with pytest.raises(ManifestError, match=r"00000003\.json: the snapshot cannot be used") as caught:
        FeatureStore.open(copy)
    assert len(str(caught.value)) < 2000
    assert len(FeatureStore.open(copy, snapshot=2)) == 30


@pytest.mark.parametrize(
    "body",
    [
        b'{"format": 1, "id": NaN',
        b'{"format": 1, "id": 3, "id": 4',
        b'{"format": 1, "extra": ' + b"[" * 100_000,
        b'{"format": 1, "id": ' + b"9" * 100_000,
        b'{"format": 1, "message": "\xff"',
        b'{"format": true',
        b'{"format": 1.0',
        b'{"format": []',
        b'["format"',
        b'"format"',
        b"",
    ],
)
def test_json_that_is_no_snapshot(body):
    with pytest.raises(StorageError, match="here"):
        decode_snapshot(signed(body), "here")


def test_keys_that_occur_twice_are_refused(copy):
    """Another reader might take the first of two, and see another store than this one."""
    path = newest_file(copy)
    body = path.read_bytes().rpartition(b',\n"checksum": "')[0]
    path.write_bytes(signed(body.replace(b'"bytes": ', b'"bytes": 1, "bytes": ', 1)))
    with pytest.raises(ManifestError, match="two members"):
        FeatureStore.open(copy)


FITTING_BUT_FALSE = {
    "one row too many": (
        lambda f: _set_rows(f, 11),
        [lambda s: s.key(25), lambda s: s.row("k25"), lambda s: s.select().column("number")],
    ),
    "a type that the file does not have": (
        lambda f: f["columns"]["split"].update(type="int"),
        [lambda s: s.select().column("split"), lambda s: s.select("split > 3")],
    ),
    "the index in place of the keys": (
        lambda f: f["parts"][1].update(keys=f["parts"][1]["index"]),
        [lambda s: s.key(25), lambda s: s.row("k25"), lambda s: s.blob(25)],
    ),
    "the keys in place of the index": (
        lambda f: f["parts"][1].update(index=f["parts"][1]["keys"]),
        [lambda s: s.select("number = 25"), lambda s: s.select().column("number")],
    ),
    "the keys in place of the tensors": (
        lambda f: f["parts"][1]["tensors"]["x"].update(path=f["parts"][1]["keys"]["path"]),
        [lambda s: s.tensor("x")[20:22]],
    ),
}  # fmt: skip


def _set_rows(fields: dict, rows: int) -> None:
    part = fields["parts"][1]
    part.update(rows=rows, end_row=20 + rows, tensors={})
    part["index"]["rows"] = part["keys"]["rows"] = rows
    fields.update(num_rows=19 + rows, next_row=20 + rows)


@pytest.mark.parametrize("name", FITTING_BUT_FALSE)
def test_a_manifest_that_does_not_fit_its_files(copy, name):
    change, reads = FITTING_BUT_FALSE[name]
    try:
        rewrite(copy, change)
        store = FeatureStore.open(copy)
    except ManifestError:
        return
    for read in reads:
        with pytest.raises(StorageError):
            read(store)
    assert store.blob(3) and store.key(4) == "k4"


def test_a_small_file_that_unfolds_to_millions_of_rows(copy):
    """The sizes and the checksum are right; the number of rows is compared before any is unfolded."""
    store = FeatureStore.open(copy)
    index = copy / store.snapshot.parts[1].index.path
    rows = 3_000_000
    bomb = {
        "key": pa.repeat("k", rows),
        "hash": pa.nulls(rows, pa.string()),
        "bytes": pa.nulls(rows, pa.int64()),
    }
    pq.write_table(pa.table({**bomb, "number": pa.repeat(25, rows), "split": pa.repeat("a", rows)}), index)
    content = index.read_bytes()
    assert len(content) < 100_000
    rewrite(
        copy,
        lambda f: f["parts"][1]["index"].update(bytes=len(content), xxh3=xxhash.xxh3_128_hexdigest(content)),
    )
    store = FeatureStore.open(copy)
    before = pa.total_allocated_bytes()
    for read in (lambda: store.select().column("number"), lambda: store.select()[-3:].to_arrow()):
        with pytest.raises(StorageError, match=f"{rows} rows, the snapshot says 10"):
            read()
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert store.select()[:5].column("number").to_pylist() == [0, 1, 2, 3, 4]
    assert not store.verify().ok
