from __future__ import annotations

import io
import json
import multiprocessing
import resource
import signal
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from storage import CorruptionError, DuplicateKeyError, FeatureStore, StorageError, StorageFullError
from storage.exchange import FORMATS, export_rows

KEYS = [
    "plain",
    "with.dots.jpg",
    "a/b/c.d",
    "./x/../y",
    "/absolute/",
    "two//slashes",
    "%41",
    "A",
    "Grüße 東京",
    "x" * 700,
    "nul\0tab\tnew\nline",
    ".",
    "C:\\dir\\file.png",
]


def picture(i: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (4, 3), (i, 2 * i, 3 * i)).save(data, "PNG")
    return data.getvalue()


def rows() -> list[dict]:
    made = []
    for i, key in enumerate(KEYS):
        made.append(
            {
                "key": key,
                "blob": None if i == 3 else b"" if i == 4 else picture(i),
                "tensors": {
                    "codes": (np.arange(6) + i).astype(np.int16).reshape(2, 3),
                    "Half": np.array([i / 3, -0.0, np.inf], np.float16),
                    "flags": np.array([i % 2, 1, 0, 1, 1], bool),
                    "count": None if i in (2, 5) else np.array(1 << 63, np.uint64),
                },
                "caption": None if i == 1 else "" if i == 2 else f"caption {i}\0 é\n",
                "big": (1 << 62) + i if i % 3 else -(1 << 63),
                "id64": (1 << 64) - 1 - i,
                "code": "007",
                "day": "2020-01-01",
                "score": 1.0 if i else None,
                "ok": bool(i % 2),
                "tags": [i, "x", {"n": None, "id": (1 << 64) - 1}] if i != 5 else {},
                "empty": None,
            }
        )
    return made


@pytest.fixture
def source(tmp_path: Path) -> FeatureStore:
    store = FeatureStore.create(tmp_path / "source")
    tensors = {
        "codes": ("int16", (2, 3)),
        "Half": ("float16", (3,)),
        "flags": ("bool", (5,)),
        "count": ("uint64", ()),
    }
    with store.writer(tensors=tensors) as writer:
        for row in rows():
            writer.add(**row)
    return store.refresh()


def content(store: FeatureStore) -> list[tuple]:
    view = store.select()
    table = view.to_arrow(["key", "hash", "bytes", *store.snapshot.columns]).to_pylist()
    blobs = [
        None if row["bytes"] is None else bytes(store.blob(number)) for number, row in zip(view.rows, table)
    ]
    tensors = []
    for name in store.snapshot.tensors:
        column = store.tensor(name)
        values = [
            column.gather(np.array([row])).tobytes() if column.has(np.array([row]))[0] else None
            for row in view.rows
        ]
        tensors.append([name, values])
    return [table, blobs, tensors]


def export(store, path, format, **options):
    options = {"file_bytes": 1 << 30, "progress": None} | options
    return export_rows(store.select(), path, format, **options)


def load(store, path, **options) -> FeatureStore:
    store.import_rows(path, **{"message": "import", "part_bytes": 1 << 30, "progress": None} | options)
    return store.refresh()


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_exported_comes_back_equal(source, tmp_path, format):
    seen = []
    report = export(source, tmp_path / "out", format, progress=lambda done, total: seen.append((done, total)))
    assert (report.rows, report.files) == (13, len(list((tmp_path / "out").iterdir()))) and seen[-1] == (
        13,
        13,
    )
    back = load(FeatureStore.create(tmp_path / "back"), tmp_path / "out")
    assert content(back) == content(source)
    assert {n: c.type for n, c in back.snapshot.columns.items()} == {
        n: c.type for n, c in source.snapshot.columns.items()
    }
    assert back.snapshot.tensors == source.snapshot.tensors
    assert back.verify().ok and back.snapshot.id == 1
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


@pytest.mark.parametrize("format", FORMATS)
def test_small_files_small_parts_and_part_of_the_rows(source, tmp_path, format):
    view = source.select("row >= 4 and key != 'A'", order_by="key desc")
    report = export_rows(view, tmp_path / "out", format, file_bytes=1, progress=None)
    assert report.rows == 8
    files = json.loads((tmp_path / "out" / "export.json").read_text())["files"]
    assert len(files) == (8 if format == "webdataset" else 1)
    back = load(FeatureStore.create(tmp_path / "back"), tmp_path / "out", part_bytes=1)
    assert back.select().keys() == view.keys()
    assert content(back)[1] == [bytes(source.blob(row)) for row in view.rows]


@pytest.mark.parametrize("format", FORMATS)
def test_batches_and_files_are_bounded(tmp_path, monkeypatch, format):
    from storage.exchange import batches

    monkeypatch.setattr(batches, "_MAX_BYTES", 2000)
    store = FeatureStore.create(tmp_path / "source")
    store.append([{"key": f"k{i}", "blob": bytes([i]) * 900, "n": i} for i in range(40)])
    store = store.refresh()
    sizes = [len(batch.keys) for batch in batches.read_batches(store.select())]
    assert sizes == [2] * 20
    report = export(store, tmp_path / "out", format, file_bytes=16384)
    names = json.loads((tmp_path / "out" / "export.json").read_text())["files"]
    assert len(names) >= 3 and report.bytes == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())
    if format == "webdataset":
        assert all((tmp_path / "out" / name).stat().st_size <= 16384 + 10240 for name in names)
    back = load(FeatureStore.create(tmp_path / "back"), tmp_path / "out", part_bytes=9000)
    assert content(back) == content(store) and len(back.snapshot.parts) > 2


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_and_rows_of_keys_alone(tmp_path, format):
    store = FeatureStore.create(tmp_path / "source")
    export(store, tmp_path / "none", format)
    assert len(load(store, tmp_path / "none")) == 0
    store.append([{"key": "a"}, {"key": "b"}])
    export(store.refresh(), tmp_path / "out", format)
    assert load(FeatureStore.create(tmp_path / "back"), tmp_path / "out").select().keys() == ["a", "b"]


def test_webdataset_reads_the_tars(source, tmp_path):
    webdataset = pytest.importorskip("webdataset")
    export(source, tmp_path / "out", "webdataset")
    samples = list(
        webdataset.WebDataset(str(tmp_path / "out" / "shard-000000.tar"), shardshuffle=False).decode()
    )
    assert [sample["json"]["key"] for sample in samples] == KEYS
    assert len({sample["__key__"] for sample in samples}) == 13
    assert samples[0]["__key__"] == "plain" and samples[1]["__key__"] == "with%2Edots%2Ejpg"
    assert samples[2]["__key__"] == "a/b/c%2Ed" and samples[8]["__key__"] == "Grüße 東京"
    assert samples[0]["png"] is not None and samples[0]["txt"] == "caption 0\0 é\n"
    assert samples[1]["codes.npy"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert "png" not in samples[3] and "count.npy" not in samples[2]
    assert samples[0]["json"]["tags"][2]["id"] == (1 << 64) - 1


@pytest.mark.filterwarnings("ignore")
def test_datasets_reads_the_folder(source, tmp_path):
    datasets = pytest.importorskip("datasets")
    view = source.select("bytes > 0")
    export_rows(view, tmp_path / "out", "hf", file_bytes=1, progress=None)
    found = datasets.load_from_disk(str(tmp_path / "out"))
    assert len(found) == 11 and isinstance(found.features["image"], datasets.Image)
    assert found[0]["image"].getpixel((0, 0)) == (0, 0, 0) and found[1]["image"].getpixel((0, 0)) == (1, 2, 3)
    assert found["key"][:] == view.keys() and found[0]["code"] == "007" and found[2]["caption"] == ""
    numpy = found.with_format("numpy")
    assert numpy[1]["codes"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert found.features["Half"].feature.dtype == "float16"
    assert found[2]["count"] is None and found[0]["count"] == 1 << 63 and found[0]["big"] == -(1 << 63)
    export(source, tmp_path / "mixed", "hf")
    mixed = datasets.load_from_disk(str(tmp_path / "mixed"))
    assert mixed[4]["image"]["bytes"] == b"" and mixed[3]["image"] is None


@pytest.mark.filterwarnings("ignore")
def test_datasets_reads_blobs_that_are_no_pictures(tmp_path):
    datasets = pytest.importorskip("datasets")
    store = FeatureStore.create(tmp_path / "source")
    store.append([{"key": "a", "blob": b"text"}, {"key": "b"}])
    export(store.refresh(), tmp_path / "out", "hf")
    assert datasets.load_from_disk(str(tmp_path / "out"))["blob"][:] == [b"text", None]


def test_parquet_is_plain_parquet(source, tmp_path):
    export(source, tmp_path / "out", "parquet")
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    assert table.schema.field("codes").type == pa.fixed_shape_tensor(pa.int16(), (2, 3))
    assert table["image"][0].as_py() == picture(0) and table["image"][3].as_py() is None
    assert table["codes"].combine_chunks().to_numpy_ndarray()[1].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert json.loads(table["tags"][0].as_py())[2]["id"] == (1 << 64) - 1


def test_names_that_meet(tmp_path):
    store = FeatureStore.create(tmp_path / "source")
    tensors = {"x": np.zeros(2), "X": np.ones(2), "key": np.ones(1), "Caption": np.zeros(1, np.int8)}
    store.append(
        [{"key": "a", "blob": b"1", "tensors": tensors, "x": 1, "caption": "c", "image": "i", "self": 3}]
    )
    store = store.refresh()
    for format in FORMATS:
        export(store, tmp_path / format, format)
        back = load(FeatureStore.create(tmp_path / f"{format}-back"), tmp_path / format)
        assert content(back) == content(store)
    with tarfile.open(tmp_path / "webdataset" / "shard-000000.tar") as tar:
        names = [name.lower() for name in tar.getnames()]
    assert len(set(names)) == len(names) == 7


@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_a_column_of_the_name_that_pictures_have(tmp_path, format):
    store = FeatureStore.create(tmp_path / "source")
    store.append([{"key": "a", "blob": picture(1), "Image": "name.png", "tensors": {"image": np.zeros(1)}}])
    store = store.refresh()
    export(store, tmp_path / "out", format)
    assert content(load(FeatureStore.create(tmp_path / "back"), tmp_path / "out")) == content(store)


def test_gc_keeps_what_is_being_imported(source, tmp_path, monkeypatch):
    from storage.exchange import tar_files

    monkeypatch.setattr(tar_files, "_BATCH_ROWS", 3)
    export(source, tmp_path / "out", "webdataset")
    back = FeatureStore.create(tmp_path / "back")
    back.import_rows(tmp_path / "out", part_bytes=1, progress=lambda done, total: back.gc(grace_s=0))
    store = back.refresh()
    assert len(store) == 13 and len(store.snapshot.parts) == 5 and store.verify().ok


def test_a_folder_is_exported_beside_one_called_snapshots_and_not_into_a_store(source, tmp_path):
    (tmp_path / "mine" / "snapshots").mkdir(parents=True)
    export(source, tmp_path / "mine" / "out", "parquet")
    assert (tmp_path / "mine" / "out").is_dir()
    with pytest.raises(StorageError, match="lies inside of the store"):
        export(source, source.path / "out", "parquet")


def test_what_cannot_be_exported(source, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(StorageError, match="there is something of this name already"):
        export(source, tmp_path / "there", "parquet")
    with pytest.raises(StorageError, match="'zip' is none of webdataset, parquet, hf"):
        export(source, tmp_path / "out", "zip")
    with pytest.raises(StorageError, match="a row is in the view twice"):
        export_rows(source.select()[[1, 1]], tmp_path / "out", "parquet", file_bytes=1, progress=None)
    with pytest.raises(ZeroDivisionError):
        export(source, tmp_path / "out", "parquet", progress=lambda done, total: 1 // 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "there"]


def _export_with_small_files(folder: Path, format: str, connection) -> None:
    """As on a full disk: the system refuses files of more than 100 kB."""
    store = FeatureStore.open(folder / "source")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        store.export(None, folder / "out", format)
    except StorageFullError as error:
        connection.send(str(error))
    else:
        connection.send("no error")


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_leaves_nothing(tmp_path, format):
    store = FeatureStore.create(tmp_path / "source")
    store.append({"key": str(i), "blob": np.random.default_rng(i).bytes(20_000)} for i in range(20))
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_export_with_small_files, args=(tmp_path, format, theirs))
    child.start()
    theirs.close()
    assert "the disk is full" in mine.recv()
    child.join()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_export_is_refused_whole(source, tmp_path, format):
    export(source, tmp_path / "out", format)
    (name,) = json.loads((tmp_path / "out" / "export.json").read_text())["files"]
    whole = (tmp_path / "out" / name).read_bytes()
    store = FeatureStore.create(tmp_path / "back")
    (tmp_path / "out" / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptionError):
        load(store, tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    with pytest.raises(CorruptionError):
        load(store, tmp_path / "out")
    assert store.refresh().snapshot.id == 0


def test_what_cannot_be_imported(source, tmp_path):
    with pytest.raises(StorageError, match="unirl ingest"):
        load(source, tmp_path)
    export(source, tmp_path / "out", "parquet")
    with pytest.raises(DuplicateKeyError, match=r"row 0 of the commit, key 'plain'"):
        load(source, tmp_path / "out")
    record = tmp_path / "out" / "export.json"
    for old, new in (('"export": 1', '"export": 2'), ('"int"', '"inch"'), ("part-00000", "../part-00000")):
        text = record.read_text()
        record.write_text(text.replace(old, new))
        with pytest.raises(StorageError, match="the record of the export cannot be used"):
            load(source, tmp_path / "out")
        record.write_text(text)
    record.write_text(text.replace('"rows": 13', '"rows": 14'))
    with pytest.raises(CorruptionError, match="13 rows, the export had 14"):
        load(FeatureStore.create(tmp_path / "back"), tmp_path / "out")


def test_a_tar_that_somebody_packed_anew(source, tmp_path):
    export(source, tmp_path / "out", "webdataset")
    path = tmp_path / "out" / "shard-000000.tar"
    with tarfile.open(path) as tar:
        members = [(info.name, tar.extractfile(info).read()) for info in tar]
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert content(load(FeatureStore.create(tmp_path / "back"), tmp_path / "out")) == content(source)
