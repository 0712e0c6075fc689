"""Sources behind URLs: memory, file, and an HTTP server with and without ranges."""

from __future__ import annotations

import functools
import gzip
import io
import json
import tarfile
import threading
import uuid
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from datapipe import ingest
from datapipe.errors import SourceError
from datapipe.sources import Fault, FolderSource, Record, TableSource, WebDatasetSource, open_sources
from datapipe.sources.remote import RemotePath, open_url
from datapipe.sources.text_rows import one_by_one
from storage import FeatureStore


def tar_bytes(*names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in names:
            for suffix, data in (
                (".png", f"pixels {name}".encode() * 300),
                (".json", json.dumps({"text": name}).encode()),
            ):
                member = tarfile.TarInfo(name + suffix)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def parquet_bytes() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"caption": ["one", "two"], "image": [b"1", b"2"]}), buffer)
    return buffer.getvalue()


FILES = {
    "s-0.tar": tar_bytes("a", "b"),
    "s-1.tar.gz": gzip.compress(tar_bytes("c"), mtime=0),
    "s-2.tar.zst": zstandard.compress(tar_bytes("d")),
    "t.parquet": parquet_bytes(),
    "t.csv": b"image,caption\npics/1.png,one\npics/lost.png,two\n../out.png,three\n",
    "u.jsonl.gz": gzip.compress(b'{"text": "x", "key": "k"}\n', mtime=0),
    "p.txt": b"first prompt\nsecond prompt\n",
    "pics/1.png": b"picture 1",
    "pics/1.txt": b"first",
    "pics/deep/2.png": b"picture 2",
    "pics/deep/2.json": b'{"caption": "second", "n": 2}',
}


@pytest.fixture
def memory() -> Iterator[str]:
    fs, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for name, data in FILES.items():
        fs.pipe(f"{root}/{name}", data)
    yield f"memory://{root}"
    fs.rm(root, recursive=True)


class _Ranges(SimpleHTTPRequestHandler):
    """Serves ranges, as object stores do."""

    def send_head(self) -> io.BytesIO | None:  # type: ignore[override]
        path = Path(self.translate_path(self.path))
        if path.is_dir() or not path.is_file() or "Range" not in self.headers:
            return super().send_head()  # type: ignore[return-value]
        data = path.read_bytes()
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last or len(data) - 1) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        return io.BytesIO(part)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _NoRanges(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(params=[_Ranges, _NoRanges])
def http(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(request.param, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def captions(url: str, **options: object) -> list[object]:
    found = []
    for source in open_sources([url], **options):  # type: ignore[arg-type]
        for item in source.items():
            assert isinstance(item, Record), item
            if item.load is not None:
                assert item.load()
            found.append(item.caption_value())
    return found


def test_tars_by_pattern(memory: str) -> None:
    assert captions(f"{memory}/s-*.tar*") == [*"abcd"]
    (source,) = open_sources([f"{memory}/s-0.tar"])
    record = next(item for item in source.items() if isinstance(item, Record))
    assert record.key == "s-0/a" and source.name.endswith("/s-0.tar") and source.name.startswith("memory://")
    assert record.load is not None and record.load() == b"pixels a" * 300


def test_braces(memory: str) -> None:
    assert captions(f"{memory}/s-{{0..0}}.tar") == ["a", "b"]
    with pytest.raises(SourceError, match=r"s-3.tar: no such file or folder; did you mean .*s-0.tar"):
        open_sources([f"{memory}/s-{{0,3}}.tar"])


def test_tables(memory: str) -> None:
    assert captions(f"{memory}/t.parquet") == ["one", "two"]
    assert captions(f"{memory}/u.jsonl.gz") == ["x"]
    (source,) = open_sources([f"{memory}/t.csv"])
    items = list(source.items())
    assert [type(item) for item in items] == [Record, Record, Fault]
    assert isinstance(items[0], Record) and items[0].load is not None and items[0].load() == b"picture 1"
    assert isinstance(items[2], Fault) and items[2].reason == "path_outside_folder"
    with pytest.raises(ValueError, match="row_without_image"):
        items[1].load()  # type: ignore[union-attr,misc]


def test_folders(memory: str) -> None:
    (source,) = open_sources([f"{memory}/pics"])
    assert isinstance(source, FolderSource)
    found = {
        item.key: (item.caption_value(), item.load and item.load())
        for item in source.items()
        if isinstance(item, Record)
    }
    assert found == {"1": ("first", b"picture 1"), "deep/2": ("second", b"picture 2")}


def test_file_urls_are_local_paths(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("caption\nx\n")
    (source,) = open_sources([f"file://{tmp_path}/t.csv"])
    assert isinstance(source, TableSource) and source.name == f"{tmp_path}/t.csv"


def test_http(http: str) -> None:
    assert captions(f"{http}/s-{{0..0}}.tar") == ["a", "b"]
    assert captions(f"{http}/s-1.tar.gz") == ["c"]
    assert captions(f"{http}/s-2.tar.zst?download=true&X-Amz-Signature=hidden") == ["d"]
    assert captions(f"{http}/t.parquet") == ["one", "two"]
    assert captions(f"{http}/u.jsonl.gz") == ["x"]
    with pytest.raises(SourceError, match="no such file"):
        open_sources([f"{http}/s-9.tar"])


def test_secrets_do_not_reach_names_and_messages() -> None:
    url = "http://ann:pw@127.0.0.1:1/d/x.tar?part=2&token=abc&X-Amz-Signature=def&Expires=9"
    path = open_url(url)
    assert isinstance(path, RemotePath)
    assert str(path) == "http://127.0.0.1:1/d/x.tar?part=2" and path.name == "x.tar"
    assert str(path.parent / "y.png") == "http://127.0.0.1:1/d/y.png"
    with pytest.raises(SourceError, match=r"cannot be reached|no such file") as caught:
        open_sources([url])
    assert "abc" not in str(caught.value) and "pw@" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"), [("memry://x/y.tar", "did you mean memory://"), ("memory://none/x.tar", "no such")]
)
def test_urls_that_lead_nowhere(url: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_sources([url])


def test_a_remote_tar_names_no_local_file(memory: str) -> None:
    assert isinstance(open_sources([f"{memory}/s-0.tar"])[0], WebDatasetSource)


def test_ingest_from_a_url(memory: str, tmp_path: Path) -> None:
    report = ingest(
        [f"{memory}/u.jsonl.gz", f"{memory}/p.txt"], tmp_path / "s", format="prompts", progress=False
    )
    assert (report.num_added, report.num_bad) == (3, 0)
    table = FeatureStore.open(tmp_path / "s").query("SELECT key, source, place FROM samples ORDER BY row")
    assert table.to_pylist()[1] == {"key": "p/00000001", "source": f"{memory}/p.txt", "place": "p.txt:1"}
    again = ingest(f"{memory}/p.txt", tmp_path / "s", format="prompts", progress=False)
    assert (again.num_added, again.num_skipped) == (0, 2)


def test_a_saved_dataset(memory: str) -> None:
    fs, root = fsspec.filesystem("memory"), memory.removeprefix("memory://")
    sink = io.BytesIO()
    table = pa.table({"caption": ["one"]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    fs.pipe(f"{root}/saved/dataset_dict.json", b'{"splits": ["train"]}')
    fs.pipe(f"{root}/saved/train/state.json", b'{"_data_files": [{"filename": "d.arrow"}]}')
    fs.pipe(f"{root}/saved/train/d.arrow", sink.getvalue())
    (source,) = open_sources([f"{memory}/saved"])
    (record,) = one_by_one(source.items())
    assert isinstance(record, Record) and record.columns == {"split": "train"} and record.caption == "one"


def test_keys_of_object_stores_may_hold_marks_of_urls() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/odd/a#b?c=d e.txt", b"one\n")
    path = open_url("memory://odd/a#b?c=d e.txt")
    assert path.name == "a#b?c=d e.txt" and path.read_bytes() == b"one\n"
    assert str(path) == "memory:///odd/a#b?c=d e.txt"
    fs.rm("/odd", recursive=True)
