from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest
import xxhash

from storage.keys import lmdb_key

DOC = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.fixture
def reader(tmp_path):
    """The program at the end of docs/format.md, as a file."""
    (program,) = re.findall(
        r'```python title="read_sample.py"\n(.*?)```', DOC.read_text(encoding="utf-8"), re.DOTALL
    )
    assert sum(bool(line.strip()) for line in program.splitlines()) <= 30
    assert set(re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE)) == {
        "hashlib", "json", "sys", "pathlib", "lmdb", "pyarrow",
    }  # fmt: skip
    path = tmp_path / "read_sample.py"
    path.write_text(program, encoding="utf-8")

    def run(store: Path, key: str) -> list[str]:
        command = [sys.executable, "-I", str(path), str(store), key]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return run


def test_the_documented_reader_reads_a_sample(filled, reader, blob_of, codes_of):
    lines = reader(filled.path, "k00061")
    assert lines[0] == "row 61"
    assert "caption 'sample 61'" in lines and "score 15.25" in lines
    assert f"hash '{xxhash.xxh3_128_hexdigest(blob_of(61))}'" in lines
    assert f"blob {blob_of(61).hex()}" in lines
    assert f"tensor codes {codes_of(61).tolist()}" in lines


def test_the_documented_reader_reads_long_keys(empty, reader):
    empty.append([{"key": "é" * 400, "blob": b"long"}, {"key": "bare"}])
    assert f"blob {b'long'.hex()}" in reader(empty.path, "é" * 400)
    assert reader(empty.path, "bare") == ["row 1", "key 'bare'", "hash None", "bytes None"]


def test_the_documented_reader_knows_deleted_rows(filled, reader):
    filled.delete("width = 61")
    assert reader(filled.path, "k00061") == []
    filled.append([{"key": "k00061", "blob": b"again"}])
    lines = reader(filled.path, "k00061")
    assert lines[0] == "row 100" and f"blob {b'again'.hex()}" in lines


def test_the_documented_reader_reads_compacted_and_renamed(filled, reader, codes_of):
    filled.delete("width < 10")
    filled.compact()
    filled.rename_column("caption", "text")
    filled.rename_column("codes", "tokens")
    lines = reader(filled.path, "k00061")
    assert lines[0] == "row 61" and "text 'sample 61'" in lines
    assert f"tensor tokens {codes_of(61).tolist()}" in lines


def test_the_documented_reader_reads_sparse_columns(filled, reader):
    values = [(f"k{i:05d}", np.array([i, -i])) for i in (3, 61, 70)]
    filled.add_column("some", values, dtype="int64", shape=(2,), sparse=True)
    assert "tensor some [61, -61]" in reader(filled.path, "k00061")
    assert not any("some" in line for line in reader(filled.path, "k00062"))
    filled.compact()
    assert "tensor some [70, -70]" in reader(filled.path, "k00070")


def test_every_file_is_of_a_documented_kind(filled):
    filled.add_column("late", lambda view: view.rows.astype(np.int32), dtype="int32", shape=())
    filled.add_column("some", [("k00003", np.zeros(2))], dtype="float64", shape=(2,), sparse=True)
    with filled.writer() as writer:
        writer.quarantine(key="k", place="p", reason="r")
    filled.rename_column("width", "w")
    filled.delete("w = 3")
    filled.tag("v1")
    filled.compact()
    part = r"[0-9a-z]{21,}"
    kinds = [
        r"snapshots/\d{8}\.json",
        rf"index/part-{part}\.parquet",
        rf"index/part-{part}-{part}\.parquet",
        rf"index/part-{part}\.keys\.arrow",
        rf"index/part-{part}\.rows\.arrow",
        rf"blobs/{part}/data\.mdb",
        rf"tensors/(codes|late|some)/{part}(-{part})?(\.rows)?\.arrow",
        rf"quarantine/part-{part}\.parquet",
        rf"index/deleted-{part}-\d+\.arrow",
        r"tags/[\w.-]+\.json",
        r"newest-snapshot",
    ]
    for path in filled.path.rglob("*"):
        if path.is_file():
            name = path.relative_to(filled.path).as_posix()
            assert any(re.fullmatch(kind, name) for kind in kinds), name


def test_blobs_lie_where_lmdb_finds_them(filled, blob_of):
    for part, numbers in zip(filled.snapshot.parts, (range(60), range(60, 100))):
        path = filled.path / part.blobs.path
        content = path.read_bytes()
        table = filled.part(filled.snapshot.parts.index(part)).keys("never")
        with lmdb.open(str(path.parent), readonly=True, lock=False) as env, env.begin() as transaction:
            for row, i in enumerate(numbers):
                start = table.blob_offset[row]
                assert transaction.get(lmdb_key(f"k{i:05d}".encode())) == blob_of(i)
                assert content[start : start + table.blob_bytes[row]] == blob_of(i)
            assert transaction.stat()["entries"] == len(numbers)
