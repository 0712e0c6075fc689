from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from storage import (
    CorruptionError,
    FeatureStore,
    FormatVersionError,
    ManifestError,
    MissingShardError,
    StorageError,
)
from storage.manifest_json import decode_snapshot, encode_snapshot


def rewrite(store: FeatureStore, change) -> None:
    """Alter the newest snapshot file and give it a right checksum, as an attacker would."""
    path = store.path / "snapshots" / f"{store.snapshot.id:08d}.json"
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    change(fields)
    body = json.dumps(fields).encode()[:-1]
    path.write_bytes(body + b',\n"checksum": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n')


def test_a_snapshot_reads_back_equal(filled):
    content = encode_snapshot(filled.snapshot)
    assert decode_snapshot(content, "here") == filled.snapshot
    assert json.loads(content)["format"] == 2
    rewrite(filled, lambda fields: fields.update(message="rewritten"))
    assert FeatureStore.open(filled.path).snapshot.message == "rewritten"


def test_parts_that_were_encoded_before_are_told_apart(filled):
    parts = filled.snapshot.parts
    changed = replace(filled.snapshot, parts=(replace(parts[0], first_row=1), *parts[1:]))
    before = encode_snapshot(filled.snapshot)
    assert encode_snapshot(changed) != before == encode_snapshot(filled.snapshot)
    assert json.loads(encode_snapshot(changed))["parts"][0]["first_row"] == 1


def test_an_altered_or_short_snapshot_is_refused(filled):
    path = filled.path / "snapshots" / "00000002.json"
    content = path.read_bytes()
    for damaged in (
        content[:-100],
        content[: len(content) // 2],
        b"",
        b"\0" * len(content),
        content.replace(b'"num_rows": 100', b'"num_rows": 101'),
        content.replace(b"60:100", b"60:101"),
        b"[" * 200_000,
        b"null",
    ):
        path.write_bytes(damaged)
        with pytest.raises(ManifestError, match=r"00000002\.json: .*snapshot=1"):
            FeatureStore.open(filled.path)
        assert len(FeatureStore.open(filled.path, snapshot=1)) == 60
        with pytest.raises(ManifestError):
            filled.append([{"key": "new"}])


def test_a_snapshot_under_another_name_is_refused(filled):
    folder = filled.path / "snapshots"
    shutil.copy(folder / "00000001.json", folder / "00000003.json")
    with pytest.raises(ManifestError, match="holds snapshot 1"):
        FeatureStore.open(filled.path)


def test_another_format_says_which(filled):
    rewrite(filled, lambda fields: fields.update(format=3, parts="in another form"))
    with pytest.raises(FormatVersionError, match="format 3, this version reads formats 1 and 2"):
        FeatureStore.open(filled.path)


HOSTILE = {
    "absolute path": lambda f: f["parts"][0]["blobs"].update(path="/etc/passwd"),
    "parent folder": lambda f: f["parts"][0]["blobs"].update(path="blobs/../../other/data.mdb"),
    "other folder": lambda f: f["parts"][0]["index"].update(path="snapshots/00000000.json"),
    "empty step": lambda f: f["parts"][0]["keys"].update(path="index//x"),
    "backslash": lambda f: f["parts"][0]["keys"].update(path="index\\x"),
    "nul": lambda f: f["parts"][0]["keys"].update(path="index/x\0y"),
    "size 2^63": lambda f: f["parts"][0]["blobs"].update(bytes=2**63),
    "negative size": lambda f: f["parts"][0]["blobs"].update(bytes=-1),
    "size as text": lambda f: f["parts"][0]["blobs"].update(bytes="12"),
    "rows 2^63": lambda f: f["parts"][0].update(rows=2**63),
    "rows true": lambda f: f["parts"][0].update(rows=True),
    "no rows": lambda f: f["parts"][0].update(rows=0),
    "overlap": lambda f: f["parts"][1].update(first_row=10),
    "sum": lambda f: f.update(num_rows=99),
    "next row": lambda f: f.update(next_row=50),
    "tensor overruns": lambda f: f["parts"][0]["tensors"]["codes"].update(offset=1 << 40),
    "tensor unaligned": lambda f: f["parts"][0]["tensors"]["codes"].update(offset=3),
    "huge shape": lambda f: f["tensors"]["codes"].update(shape=[1 << 50, 1 << 50]),
    "object dtype": lambda f: f["tensors"]["codes"].update(dtype="O"),
    "no dtype": lambda f: f["tensors"]["codes"].update(dtype="nonsense"),
    "tensor name": lambda f: f["tensors"].update({"../x": f["tensors"]["codes"]}),
    "unknown tensor": lambda f: f["parts"][0]["tensors"].update(other=f["parts"][0]["tensors"]["codes"]),
    "column type": lambda f: f["columns"]["caption"].update(type="blob"),
    "part id": lambda f: f["parts"][0].update(id="../../x"),
    "missing field": lambda f: f["parts"][0].pop("keys"),
    "parts null": lambda f: f.update(parts=None),
    "checksum form": lambda f: f["parts"][0]["blobs"].update(xxh3="zz"),
    "size 1e3": lambda f: f["parts"][0]["blobs"].update(bytes=1e3),
    "more rows than bytes": lambda f: f["parts"][0].update(rows=2**50, end_row=2**50),
    "other byte order": lambda f: f["tensors"]["codes"].update(dtype=">i2"),
    "alias of a dtype": lambda f: f["tensors"]["codes"].update(dtype="h"),
    "too many axes": lambda f: f["tensors"]["codes"].update(shape=[1] * 33),
    "empty axis": lambda f: f["tensors"]["codes"].update(shape=[8, 0]),
    "negative axis": lambda f: f["tensors"]["codes"].update(shape=[-8]),
    "huge unused shape": lambda f: f["tensors"].update(big={"dtype": "int8", "shape": [2**40, 2**40]}),
    "model as text": lambda f: f["tensors"]["codes"].update(model="siglip"),
    "model without hash": lambda f: f["tensors"]["codes"].update(model={"name": "siglip"}),
    "column named row": lambda f: f["columns"].update(ROW=f["columns"]["width"]),
    "columns but for case": lambda f: f["columns"].update(Width=f["columns"]["width"]),
    "column with NUL": lambda f: f["columns"].update({"a\0b": f["columns"]["width"]}),
    "lone surrogate": lambda f: f.update(message="\ud800"),
    "part twice": lambda f: f["parts"][1].update(id=f["parts"][0]["id"]),
    "file twice": lambda f: f["parts"][1].update(index={**f["parts"][0]["index"], "rows": 40}),
    "deep path": lambda f: f["parts"][0]["keys"].update(path="index/a/b/c"),
    "row numbers below 0": lambda f: f["parts"][0].update(first_row=-1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(filled, name):
    rewrite(filled, HOSTILE[name])
    with pytest.raises(ManifestError, match=r"00000002\.json: the snapshot cannot be used"):
        FeatureStore.open(filled.path)


@pytest.mark.parametrize("text", ["NaN", "Infinity", '{"a": 1, "a": 2}', "[" * 5000 + "]" * 5000])
def test_what_json_readers_disagree_about_is_refused(filled, text):
    rewrite(filled, lambda fields: fields.update(extra="HERE"))
    path = filled.path / "snapshots" / "00000002.json"
    body = path.read_bytes().rpartition(b',\n"checksum"')[0].replace(b'"HERE"', text.encode())
    path.write_bytes(body + b',\n"checksum": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n')
    with pytest.raises(ManifestError, match="cut short or damaged"):
        FeatureStore.open(filled.path)


def test_format_1_is_read(filled):
    def change(fields):
        fields["format"] = 1
        del fields["tensors"]["codes"]["model"]
        for part in fields["parts"]:
            del part["tensors"]["codes"]["present"]

    rewrite(filled, change)
    store = FeatureStore.open(filled.path)
    assert store.tensor("codes").has(store.select().rows).all() and store.tensor_models == {"codes": None}
    store.append([{"key": "next"}])
    assert json.loads((filled.path / "snapshots" / "00000003.json").read_bytes())["format"] == 2


def test_a_long_value_is_cut_in_the_error(filled):
    rewrite(filled, lambda fields: fields["parts"][0].update(id="x" * 10_000_000))
    with pytest.raises(ManifestError) as caught:
        FeatureStore.open(filled.path)
    assert len(str(caught.value)) < 1000


def test_a_link_in_place_of_a_shard_is_refused(filled, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    part = filled.snapshot.parts[0]
    shutil.move(filled.path / part.blobs.path, outside / "data.mdb")
    (filled.path / part.blobs.path).symlink_to(outside / "data.mdb")
    with pytest.raises(ManifestError, match="symbolic link"):
        FeatureStore.open(filled.path).blob(0)
    shutil.move(filled.path / "tensors", outside / "tensors")
    (filled.path / "tensors").symlink_to(outside / "tensors")
    with pytest.raises(ManifestError, match="symbolic link"):
        FeatureStore.open(filled.path).tensor("codes").gather(np.array([0]))


READS = {
    "blobs": lambda store: store.blob(3),
    "index": lambda store: store.select("width = 3"),
    "keys": lambda store: store.key(3),
    "codes": lambda store: store.tensor("codes")[3:4],
}


def files_of(store: FeatureStore) -> dict:
    part = store.snapshot.parts[0]
    return {"blobs": part.blobs, "index": part.index, "keys": part.keys, "codes": part.tensors["codes"]}


@pytest.mark.parametrize("policy", ["first-read", "never"])
@pytest.mark.parametrize("name", READS)
def test_a_missing_or_short_shard_is_an_error_before_it_is_mapped(cold, name, policy):
    path = cold / files_of(FeatureStore.open(cold))[name].path
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(CorruptionError, match=rf"{path.name}: the shard has {size - 1} bytes, .* {size}"):
        READS[name](FeatureStore.open(cold, verify=policy))
    path.unlink()
    with pytest.raises(MissingShardError, match=f"{path.name}: the shard is missing"):
        READS[name](FeatureStore.open(cold, verify=policy))
    path.mkdir()
    with pytest.raises(StorageError, match=path.name):
        READS[name](FeatureStore.open(cold, verify=policy))
    store = FeatureStore.open(cold)
    assert store.blob(70) and store.tensor("codes")[70:71].any() and store.key(70) == "k00070"


def test_a_shard_of_another_store_is_noticed(filled, cold, tmp_path):
    other = FeatureStore.create(tmp_path / "other")
    with other.writer(tensors={"codes": ("int16", (8,))}) as writer:
        for i in range(60):
            writer.add(f"k{i:05d}", bytes(filled.blob(i))[::-1], {"codes": np.full(8, i, np.int16)}, width=i)
    other = other.refresh()
    for name in ("blobs", "codes"):
        mine, theirs = files_of(filled)[name], files_of(other)[name]
        shutil.copy(other.path / theirs.path, cold / mine.path)
        with pytest.raises(CorruptionError):
            READS[name](FeatureStore.open(cold))
