"""Field cases of Arrow and Parquet: offsets, row groups, rewritten maps, hidden copies, cut files."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import CorruptionError, FeatureStore
from tools.soak.memory import read_in_little_memory, write_large_store


@pytest.fixture
def store(tmp_path):
    store = FeatureStore.create(tmp_path / "store")
    with store.writer(tensors={"x": ("float32", (256, 64))}) as writer:
        for i in range(200):
            writer.add(
                f"k{i}", b"blob %d" % i, {"x": np.full((256, 64), i, np.float32)}, caption=f"sample {i}"
            )
    return store.refresh()


def test_arrow_01_payload_offsets_have_64_bits(store):
    part = store.snapshot.parts[0]
    assert pq.read_schema(store.path / part.index.path).field("caption").type == pa.large_string()
    with pa.memory_map(str(store.path / part.keys.path)) as source:
        assert pa.ipc.open_file(source).schema.field("key").type == pa.large_string()
    for table in (store.select().to_arrow(), store.query("SELECT * FROM samples")):
        assert table.schema.field("caption").type == pa.large_string()
    with store.writer() as writer:
        writer.quarantine(key="k", place="p", reason="r", data=b"x")
    assert store.refresh().quarantined().schema.field("data").type == pa.large_binary()


def test_arrow_02_row_groups_are_bounded_and_nested_values_read_back(tmp_path):
    store = FeatureStore.create(tmp_path / "store")
    nested = {"boxes": [[1, 2, 3, 4]] * 3, "label": {"name": "cat", "tags": ["a", None]}}
    store.append({"key": str(i), "text": chr(97 + i % 26) * (1 << 20), "meta": nested} for i in range(160))
    store = store.refresh()
    with pq.ParquetFile(store.path / store.snapshot.parts[0].index.path) as file:
        sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
        assert len(sizes) >= 3 and max(sizes) < 100 << 20
        assert not any(pa.types.is_nested(field.type) for field in file.schema_arrow)
    row = store.select("key = '159'").to_arrow(["text", "meta"]).to_pylist()[0]
    assert row["text"][:3] == chr(97 + 159 % 26) * 3 and len(row["text"]) == 1 << 20
    assert (
        store.query("SELECT count(*) FROM samples WHERE meta->>'$.label.name' = 'cat'").column(0)[0].as_py()
        == 160
    )


def test_arrow_03_no_published_file_is_ever_rewritten(store):
    def fingerprints() -> dict[Path, tuple[int, int, int]]:
        """All but what lies beside the folders: the hint which snapshot is the newest."""
        found = {path: path.stat() for path in store.path.glob("*/**/*") if path.is_file()}
        return {path: (status.st_ino, status.st_mtime_ns, status.st_size) for path, status in found.items()}

    before = fingerprints()
    store.append([{"key": "more", "blob": b"1"}])
    store.add_column("y", lambda view: view.rows, dtype="int64", shape=())
    store.restore(1)
    store.gc(grace_s=0)
    after = fingerprints()
    assert before.items() <= after.items()


def test_arrow_03_a_reader_keeps_what_it_mapped_and_notices_another_file(store):
    path = store.path / store.snapshot.parts[0].tensors["x"].path
    view = store.tensor("x")[0:100]
    other = path.with_suffix(".new")
    other.write_bytes(os.urandom(path.stat().st_size))
    other.rename(path)
    assert (view == np.arange(100, dtype=np.float32)[:, None, None]).all()
    assert (store.tensor("x").gather(np.arange(100, 200))[:, 0, 0] == np.arange(100, 200)).all()
    with pytest.raises(CorruptionError, match="was replaced while it was in use"):
        store.tensor("x")[0:1]


def _change_under_a_reader(path: Path, change: str, read: str, connection) -> None:
    faulthandler.disable()
    store = FeatureStore.open(path, verify="always")
    column = store.tensor("x")
    column.gather(np.arange(200))
    shard = path / store.snapshot.parts[0].tensors["x"].path
    content = shard.read_bytes()
    with shard.open("r+b") as file:
        if change == "truncate":
            file.truncate(4096)
        else:
            file.seek(len(content) // 2)
            file.write(b"other" * 100)
    try:
        rows = column[0:200] if read == "view" else column.gather(np.arange(200))
    except CorruptionError as error:
        connection.send(str(error))
    else:
        connection.send(float(rows.sum()))


@pytest.mark.parametrize("read", ["view", "gather"])
@pytest.mark.parametrize("change", ["truncate", "rewrite"])
def test_arrow_03_a_shard_that_is_changed_in_place_is_never_read_as_if_it_were_whole(store, change, read):
    """Nobody should do this. Views and checksums notice it; SIGBUS ends what else touches a cut map."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_change_under_a_reader, args=(store.path, change, read, theirs))
    child.start()
    theirs.close()
    child.join()
    if child.exitcode == -signal.SIGBUS:
        assert (change, read) == ("truncate", "gather")
    else:
        assert child.exitcode == 0
        text = mine.recv()
        assert "the shard has 4096 bytes" in text or "do not match their checksum" in text


def _private_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return sum(int(kib) << 10 for kib in re.findall(r"^Private_Dirty: +(\d+) kB", text, re.MULTILINE))


def test_arrow_04_reading_allocates_nothing(store):
    path = store.path / store.snapshot.parts[0].tensors["x"].path
    assert path.stat().st_size < 200 * 256 * 64 * 4 + 10_000
    allocated, private = pa.total_allocated_bytes(), _private_bytes()
    column = store.tensor("x")
    total = sum(float(column[i : i + 20].sum()) for i in range(0, 200, 20))
    assert total == 256 * 64 * sum(range(200))
    assert pa.total_allocated_bytes() - allocated < 100_000
    assert _private_bytes() - private < 3 << 20
    assert store.counters.bytes_copied == 0 and store.counters.bytes_read == 200 * 256 * 64 * 4


def test_arrow_06_half_written_files_count_for_nothing(store):
    part = store.snapshot.parts[0]
    index = store.path / part.index.path
    content = index.read_bytes()
    for name, data in (
        ("part-dead.parquet", content[:-3]),
        ("_SUCCESS", b""),
        (f".{index.name}.crc", b"crc"),
        (f"{index.name}.tmp", content[:10]),
    ):
        (index.parent / name).write_bytes(data)
    (store.path / "snapshots" / "00000002.json.tmp").write_bytes(b"{")
    fresh = FeatureStore.open(store.path)
    assert len(fresh.select("caption = 'sample 7'")) == 1 and fresh.verify().ok
    fresh.append([{"key": "next"}])
    copy = Path(shutil.copytree(store.path, store.path.parent / "copy"))
    (copy / part.index.path).write_bytes(content[:-3])
    with pytest.raises(CorruptionError, match=f"{index.name}: the shard has {len(content) - 3} bytes"):
        FeatureStore.open(copy).select("caption = 'sample 7'")


def test_arrow_08_page_cache_is_not_private_memory(store):
    rng = np.random.default_rng(0)
    column = store.tensor("x")
    batch = np.empty((16, 256, 64), np.float32)
    column.gather(rng.integers(0, 200, 16), out=batch)
    before = _private_bytes()
    for _ in range(60):
        rows = rng.integers(0, 200, 16)
        column.gather(rows, out=batch)
        assert (batch[:, 0, 0] == rows).all()
    assert _private_bytes() - before < 3 << 20
    assert store.counters.bytes_copied == 61 * batch.nbytes


@pytest.mark.slow
def test_arrow_08_a_store_larger_than_the_memory_limit_is_read_to_its_end(tmp_path):
    """A memory cgroup where one can be made, else a limit on the heap; `make soak` reads 2 GB in 512 MB."""
    write_large_store(tmp_path / "store", 192 << 20)
    assert read_in_little_memory(tmp_path / "store", 96 << 20) in ("cgroup", "heap limit")
