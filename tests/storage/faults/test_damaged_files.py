"""Files that are cut, lost, mixed up or have flipped bits: an error with the place; the rest stays usable."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore, StorageError

KINDS = ("index", "keys", "rows", "deleted", "blobs", "tensors", "sparse", "present", "quarantine")
ROWS = 32


@pytest.fixture(scope="module")
def rich(tmp_path_factory, make_store, blob_of) -> Path:
    """Every kind of file: compacted with row numbers, a second part, deleted rows, refused files, a tag."""
    store = make_store(tmp_path_factory.mktemp("rich") / "store")
    store.compact()
    with store.writer(tensors={"x": ("int32", (4,))}) as writer:
        for i in (30, 31):
            writer.add(f"k{i}", blob_of(i), {"x": np.full(4, i, np.int32)}, number=i, split="a")
    store.delete("number = 9")
    values = [(f"k{i}", np.full(2, i, np.float32)) for i in (0, 19, 31)]
    store.add_column("s", values, dtype="float32", shape=(2,), sparse=True)
    assert store.refresh().snapshot.id == 7
    return store.path


@pytest.fixture
def damaged(rich, tmp_path) -> Path:
    return Path(shutil.copytree(rich, tmp_path / "damaged"))


def files_of(path: Path, kind: str) -> list[Path]:
    """The files of a kind that the newest snapshot needs."""
    if kind in ("snapshot", "tag"):
        return [path / ("snapshots/00000007.json" if kind == "snapshot" else "tags/v1.json")]
    snapshot = FeatureStore.open(path).snapshot
    found = {
        "index": [part.index for part in snapshot.parts],
        "keys": [part.keys for part in snapshot.parts],
        "rows": [part.row_ids for part in snapshot.parts],
        "deleted": [snapshot.deleted],
        "blobs": [part.blobs for part in snapshot.parts],
        "tensors": [part.tensors["x"] for part in snapshot.parts],
        "sparse": [part.tensors["s"] for part in snapshot.parts],
        "present": [part.tensors["s"].present for part in snapshot.parts],
        "quarantine": snapshot.quarantine,
    }
    return [path / file.path for file in found[kind] if file is not None]


def live_rows() -> list[int]:
    return [i for i in range(ROWS) if i not in (5, 9)]


def read_honestly(store: FeatureStore, blob_of, rows: tuple[int, ...] = (0, 19, 31)) -> int:
    """Every way to some rows gives what was written, or an error of the store; how many errors."""
    reads = [(lambda: store.quarantined().num_rows, 2), (lambda: store.tags(), {"v1": 2})]
    reads.append((lambda: store.select("number < 100").rows.tolist(), live_rows()))
    reads.append((lambda: store.select().column("number").to_pylist(), live_rows()))
    for i in rows:
        reads += [
            (lambda i=i: store.key(i), f"k{i}"),
            (lambda i=i: store.row(f"k{i}"), i),
            (lambda i=i: bytes(store.blob(i)), blob_of(i)),
            (lambda i=i: store.tensor("x").gather(np.array([i])).tolist(), [[i] * 4]),
            (lambda i=i: store.tensor("x")[i : i + 1].tolist(), [[i] * 4]),
        ]
    if 0 in rows:
        reads.append((lambda: store.tensor("s").gather(np.array([0, 31])).tolist(), [[0.0] * 2, [31.0] * 2]))
    errors = 0
    for read, wanted in reads:
        try:
            assert read() == wanted
        except StorageError:
            errors += 1
    return errors


def replace(path: Path, content: bytes) -> None:
    """Another file of the same name, as from a bad copy."""
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("flips", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*KINDS, "snapshot", "tag"])
def test_bits_flipped_at_random_places(damaged, blob_of, kind, flips):
    rng = random.Random(kind)
    paths = files_of(damaged, kind)
    for number in range(flips):
        path = paths[number % len(paths)]
        content = path.read_bytes()
        at = rng.randrange(len(content))
        replace(path, content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
        try:
            store = FeatureStore.open(damaged, verify="always" if number % 2 else "first-read")
        except StorageError as error:
            assert path.name in str(error)
        else:
            read_honestly(store, blob_of, (number % 2 * 31, at % 5))
            if kind not in ("tag", "snapshot"):
                assert [problem.path for problem in store.verify().problems] == [
                    path.relative_to(damaged).as_posix()
                ]
        replace(path, content)
    assert read_honestly(FeatureStore.open(damaged, verify="always"), blob_of) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["first-read", "never"])
def test_cut_longer_or_lost(damaged, blob_of, kind, policy):
    """The size is compared before anything is mapped, whatever the policy."""
    path = files_of(damaged, kind)[0]
    content = path.read_bytes()
    for change in (content[:-1], content[: len(content) // 2], content + b"\0", b"", None):
        path.unlink(missing_ok=True)
        text = "is missing"
        if change is not None:
            path.write_bytes(change)
            text = f"has {len(change)} bytes, the snapshot says {len(content)}"
        try:
            store = FeatureStore.open(damaged, verify=policy)
        except StorageError as error:
            assert path.name in str(error) and text in str(error)
        else:
            assert read_honestly(store, blob_of) > 0
            (problem,) = store.verify().problems
            assert problem.path == path.relative_to(damaged).as_posix() and text in problem.text


def test_a_snapshot_cut_at_every_length(damaged):
    path = damaged / "snapshots" / "00000007.json"
    content = path.read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 2]:
        path.write_bytes(content[:length])
        with pytest.raises(StorageError, match=r"00000007\.json"):
            FeatureStore.open(damaged)
    assert FeatureStore.open(damaged, snapshot=6).verify().problems[0].path == "snapshots/00000007.json"


@pytest.mark.parametrize("kind", ["index", "keys", "blobs", "tensors"])
def test_the_other_parts_stay_usable(damaged, blob_of, kind):
    """One part is lost; rows of the other part are read as before, by row and by key."""
    lost, _ = FeatureStore.open(damaged).snapshot.parts
    file = {"index": lost.index, "keys": lost.keys, "blobs": lost.blobs, "tensors": lost.tensors["x"]}[kind]
    (damaged / file.path).unlink()
    store = FeatureStore.open(damaged)
    for i in (30, 31):
        assert store.key(i) == f"k{i}" and store.blob(i) == blob_of(i)
        assert store.tensor("x")[i : i + 1].tolist() == [[i] * 4]
        assert store.select()[-2:].column("number").to_pylist() == [30, 31]
    if kind != "keys":
        assert store.row("k31") == 31
    for name, read in {
        "index": lambda: store.select("number = 3"),
        "keys": lambda: store.key(3),
        "blobs": lambda: store.blob(3),
        "tensors": lambda: store.tensor("x")[3:4],
    }.items():
        if name == kind:
            with pytest.raises(StorageError, match=Path(file.path).name):
                read()
        elif not (kind == "keys" and name == "blobs"):
            read()


@pytest.mark.parametrize("kind", ["index", "keys", "blobs", "tensors"])
def test_a_file_of_another_store_of_the_same_name_and_size(damaged, blob_of, kind):
    path = files_of(damaged, kind)[0]
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 3, len(content) // 2, 7):
        content[at] ^= 0x55
    path.unlink()
    path.write_bytes(content)
    store = FeatureStore.open(damaged)
    assert read_honestly(store, blob_of) > 0 or kind in ("blobs", "tensors")
    assert {p.path for p in store.verify().problems} == {path.relative_to(damaged).as_posix()}
