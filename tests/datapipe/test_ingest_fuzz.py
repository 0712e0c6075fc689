"""Whatever stands in the headers of files: no crash, no hang, nothing outside the store."""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from datapipe import ingest
from datapipe.decode import check_image, decode_image, read_image_facts
from datapipe.errors import DecodeError, SourceError
from storage import FeatureStore

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encode(format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, format, **options)
    return buffer.getvalue()


def tagged() -> bytes:
    tags = Image.Exif()
    tags[0x0112] = 6
    return encode("JPEG", exif=tags, icc_profile=b"a profile of nothing")


HEADS = [
    tagged(),
    *(
        encode(format)
        for format in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG2000", "AVIF", "ICO", "PPM")
    ),
]


def table_file(kind: str) -> bytes:
    table = pa.table({"caption": ["one", "two"], "image": [HEADS[1], HEADS[2]], "n": [1, 2]})
    buffer = io.BytesIO()
    if kind == ".parquet":
        pq.write_table(table, buffer)
    elif kind == ".arrow":
        with pa.ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
    else:
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, data in (("ü/1.jpg", HEADS[1]), ("ü/1.txt", b"one"), ("2.png", HEADS[2])):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


FILES = {
    **{kind: table_file(kind) for kind in (".tar", ".parquet", ".arrow")},
    ".tar.gz": gzip.compress(table_file(".tar"), mtime=0),
    ".csv": b"key,caption\n1,one\n2,two\n",
    ".jsonl": b'{"key": "1", "caption": "one"}\n{"key": "2", "caption": [1, {"a": null}]}\n',
    ".json": b'[{"caption": "one"}, {"caption": "two"}]',
    ".txt": b"one\ntwo\n",
}

damage = st.lists(st.tuples(st.integers(0, 119), st.integers(0, 255)), min_size=1, max_size=6)


def changed(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    """The file with some bytes of its head replaced."""
    damaged = bytearray(data)
    for at, value in changes:
        damaged[at % min(120, len(damaged))] = value
    return bytes(damaged)


@given(data=st.sampled_from(HEADS), changes=damage)
@settings(max_examples=200, deadline=None)
def test_the_three_ways_to_look_at_a_file_agree(data: bytes, changes: list[tuple[int, int]]) -> None:
    """What the quick check accepts, the decoder gives, with the size that the facts tell."""
    damaged = changed(data, changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            facts, phash = check_image(damaged, max_pixels=10**6)
        except DecodeError as error:
            assert error.reason and error.detail
            return
        assert len(phash) == 16
        assert decode_image(damaged, max_pixels=10**6).shape == (facts.height, facts.width, 3)
        header = read_image_facts(damaged, max_pixels=10**6)
        assert (header.format, header.width, header.height) == (facts.format, facts.width, facts.height)


@given(
    files=st.lists(
        st.one_of(st.binary(max_size=300), st.builds(changed, st.sampled_from(HEADS), damage)), max_size=4
    ),
    name=st.sampled_from(["a", "x..", "b c", "ü", "-", "x.tar", "CON", "a\n"]),
    trust=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_files_end_in_rows_and_faults(files: list[bytes], name: str, trust: bool) -> None:
    with tempfile.TemporaryDirectory() as text, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = Path(text)
        folder = root / "source"
        folder.mkdir()
        for number, data in enumerate(files):
            (folder / f"{name}{number}.jpg").write_bytes(data)
        (folder / "whole.png").write_bytes(HEADS[2])
        before = sorted(path.relative_to(root) for path in root.rglob("*"))
        report = ingest(
            folder, root / "store", max_bad_fraction=1.0, max_pixels=10**6, optional=["caption"], trust=trust
        )
        assert report.num_seen == len(files) + 1
        outside = [path for path in root.rglob("*") if root / "store" not in (path, *path.parents)]
        assert sorted(path.relative_to(root) for path in outside) == before
        store = FeatureStore.open(root / "store")
        assert len(store) == report.num_added and store.quarantined().num_rows == report.num_bad
        assert store.verify().ok


@given(
    kind=st.sampled_from(sorted(FILES)),
    changes=st.lists(st.tuples(st.integers(0, 2999), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 3000),
)
@settings(max_examples=40, deadline=None)
def test_any_tar_or_table_ends_in_rows_and_faults_or_one_error(
    kind: str, changes: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(FILES[kind])
    for at, value in changes:
        damaged[at % len(damaged)] = value
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        (root / "source").mkdir()
        path = root / "source" / f"t{kind}"
        path.write_bytes(damaged[: max(len(damaged) - cut, 1)] if cut % 3 == 0 else damaged)
        try:
            report = ingest(
                path, root / "store", max_bad_fraction=1.0, max_pixels=10**6, optional=["caption", "image"]
            )
        except SourceError as error:
            assert "t" + kind in str(error) and not (root / "store").exists()
            return
        outside = [file for file in root.rglob("*") if root / "store" not in (file, *file.parents)]
        assert sorted(outside) == [root / "source", path]
        store = FeatureStore.open(root / "store")
        assert len(store) == report.num_added and store.quarantined().num_rows == report.num_bad
        assert store.verify().ok
