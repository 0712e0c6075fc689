"""Ingest on a local Ray of two workers: the same rows as the local engine, whatever dies on the way."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from datapipe import BadFractionError, IngestReport, ingest
from datapipe.errors import WorkerError
from datapipe.outcomes import SourceProgress
from datapipe.ray_plan import RunFolder
from datapipe.ray_receipt import SliceReceipt
from datapipe.ray_slices import Slice, cut_sources
from datapipe.report import Example
from datapipe.sources import FolderSource, open_sources
from datapipe.tally import Tally
from storage import FeatureStore

pytest.importorskip("ray")


def png(seed: int, side: int = 9) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, samples: dict[str, tuple[bytes, str]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for key, (image, caption) in samples.items():
            for suffix, data in (("png", image), ("txt", caption.encode())):
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def write_folder(folder: Path, num: int, side: int = 9) -> Path:
    folder.mkdir()
    for index in range(num):
        (folder / f"{index:04d}.png").write_bytes(png(index, side))
        (folder / f"{index:04d}.txt").write_text(f"picture {index}")
    return folder


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """One Ray for all tests of this file; ingest uses the one that runs."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


def run(source: object, store: Path, **options: object) -> IngestReport:
    try:
        # Commits come by rows alone: how many there are must not hang on how fast the machine is.
        return ingest(source, store, max_bad_fraction=0.0, commit_s=3600.0, **options)  # type: ignore[arg-type]
    except BadFractionError as error:
        return error.report


def rows(store: Path) -> list[dict[str, object]]:
    table = FeatureStore.open(store).select().to_arrow()
    return table.drop_columns([name for name in ("row",) if name in table.column_names]).to_pylist()


def faults(store: Path) -> list[tuple[str, str]]:
    found = FeatureStore.open(store).quarantined().to_pylist()
    return sorted((row["place"], row["reason"]) for row in found)


def test_few_sources_are_cut_and_many_are_not(tmp_path: Path) -> None:
    folder = FolderSource(write_folder(tmp_path / "a", 10))
    assert cut_sources([folder], 2) == [Slice(0, 0, 3), Slice(0, 3, 6), Slice(0, 6, 9), Slice(0, 9, None)]
    assert cut_sources([folder] * 4, 2) == [Slice(index, 0, None) for index in range(4)]
    empty = tmp_path / "t.csv"
    empty.write_text("image,caption\n")
    assert cut_sources(open_sources([empty]), 2) == [Slice(0, 0, None)]


@pytest.mark.slow
def test_the_same_rows_as_the_local_engine(tmp_path: Path, ray_here: None) -> None:
    folder = write_folder(tmp_path / "photos", 30)
    (folder / "0007.png").write_bytes(b"")
    (folder / "0019.png").write_bytes(png(3))  # with another caption
    (folder / "0021.png").write_bytes(png(2))
    (folder / "0021.txt").write_text("picture 2")  # the same sample as 0002, in another slice
    local = run(folder, tmp_path / "local")
    report = run(folder, tmp_path / "ray", engine="ray", workers=2)
    assert rows(tmp_path / "ray") == rows(tmp_path / "local")
    assert faults(tmp_path / "ray") == faults(tmp_path / "local")
    assert len(FeatureStore.open(tmp_path / "ray").snapshots()) == 2  # the driver commits once
    assert FeatureStore.open(tmp_path / "ray").verify().ok
    for name in ("num_added", "num_bad", "num_left_out", "reasons", "formats", "modes", "blob_bytes"):
        assert getattr(report, name) == getattr(local, name), name
    assert (report.num_added, report.num_left_out, report.num_bad) == (28, 1, 1)
    again = run(folder, tmp_path / "ray", engine="ray", workers=2)
    assert (again.num_added, again.num_skipped, again.num_bad) == (0, 28, 1)
    assert faults(tmp_path / "ray") == faults(tmp_path / "local")


@pytest.mark.slow
def test_keys_that_two_tars_have_are_refused_with_both_places(tmp_path: Path, ray_here: None) -> None:
    tars = [
        write_tar(tmp_path / f"s{n}.tar", {f"{k}": (png(10 * n + k), f"c{n}{k}") for k in range(4)})
        for n in range(3)
    ]
    options = {"key_prefix": "", "tensors": ["pixels:uint8[3,4,5]"]}
    local = run(tars, tmp_path / "local", **options)
    report = run(tars, tmp_path / "ray", engine="ray", workers=2, commit_rows=4, **options)
    assert (report.num_added, report.reasons) == (4, {"duplicate_key": 8}) == (local.num_added, local.reasons)
    assert rows(tmp_path / "ray") == rows(tmp_path / "local")
    assert {place for place, _ in faults(tmp_path / "ray")} == {
        place for place, _ in faults(tmp_path / "local")
    }
    assert all("s0.tar!" in reason for _, reason in faults(tmp_path / "ray"))
    store = FeatureStore.open(tmp_path / "ray")
    wanted = FeatureStore.open(tmp_path / "local").tensor("pixels")[0:4]
    np.testing.assert_array_equal(store.tensor("pixels").gather(store.select().rows), wanted)


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(
    tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes end without a word in the middle of their slice, once each."""
    folder = write_folder(tmp_path / "photos", 24)
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    (source,) = open_sources([folder])
    module = importlib.import_module("datapipe.ingesting")
    monkeypatch.setattr(module, "open_sources", lambda *args, **options: [_Deadly(source, deaths)])
    report = run(folder, tmp_path / "store", engine="ray", workers=2)
    assert len(list(deaths.iterdir())) == 2
    assert (report.num_added, report.num_bad) == (24, 0)
    store = FeatureStore.open(tmp_path / "store")
    assert store.select().keys() == [f"{index:04d}" for index in range(24)]
    assert store.verify().ok
    assert store.gc(grace_s=0.0).bytes >= 0 and store.verify().ok and len(store) == 24


class _Altered:
    """A folder read by processes to which something happens on the way."""

    def __init__(self, folder: FolderSource, marks: Path) -> None:
        self.name, self.base = folder.name, folder.base
        self._folder, self._marks = folder, marks

    def count(self) -> int | None:
        return self._folder.count()

    def observe_columns(self, kinds: object) -> None:
        self._folder.observe_columns(kinds)  # type: ignore[arg-type]

    def items(self) -> Iterator[object]:
        for number, item in enumerate(self._folder.items()):
            yield item
            self._after(number)

    def _after(self, number: int) -> None:
        raise NotImplementedError

    def _is_first(self, name: str) -> bool:
        """Whether this is the first process of all that comes here."""
        try:
            (self._marks / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class _Deadly(_Altered):
    """Two samples kill the process that reads them, the first time."""

    def _after(self, number: int) -> None:
        if number in (3, 15) and self._is_first(str(number)):
            os._exit(9)


class _DeadlyInMidWrite(_Altered):
    """Kills each process once, when a part of its slice lies half written in the store."""

    def __init__(self, folder: FolderSource, marks: Path, store: Path) -> None:
        super().__init__(folder, marks)
        self._store = store

    def _after(self, number: int) -> None:
        written = sum(path.stat().st_blocks * 512 for path in (self._store / "staging").rglob("*.mdb"))
        name = str(number // 40)  # of the slice
        if written > 2 << 20 and self._is_first(name):
            (self._marks / name).write_text(str(written))
            os.kill(os.getpid(), signal.SIGKILL)


class _Hopeless(_Altered):
    """Kills every process at the same sample."""

    def _after(self, number: int) -> None:
        if number == 3:
            self._is_first(f"{time.monotonic_ns()}")
            os._exit(9)


class _Slow(_Altered):
    """Stands still behind a sample until it is asked to stop; the first that comes there tells so."""

    def _after(self, number: int) -> None:
        if number in (4, 24):
            self._is_first(str(number))
            time.sleep(2)


def test_a_receipt_comes_back_as_it_was() -> None:
    tally = Tally(num_added=2, reasons=Counter(empty=3), notes=Counter(blank_line=1))
    tally.examples["empty"] = [Example(place="a", key="\ud800", detail="")]
    tally.duplicate_examples.append(Example(place="b", key="k", detail="the same"))
    receipt = SliceReceipt(
        slice_number=7,
        tally=tally,
        progress=SourceProgress(5, 3),
        keys=pa.array(["k", "l"]),
        places=pa.array(["a/k", "a/l"]),
        key_ids=np.array([1, 2**64 - 1], np.uint64),
        contents=np.array([0, 2**63], np.uint64),
    )
    empty = SliceReceipt(slice_number=8, error="nothing")
    one, other = SliceReceipt.from_table(pa.concat_tables([receipt.to_table(), empty.to_table()]))
    assert (one.slice_number, one.error, one.sealed, one.tally) == (7, "", None, tally)
    assert (one.progress, one.keys.to_pylist(), one.places.to_pylist()) == (
        SourceProgress(5, 3),
        ["k", "l"],
        ["a/k", "a/l"],
    )
    np.testing.assert_array_equal(one.key_ids, receipt.key_ids)
    np.testing.assert_array_equal(one.contents, receipt.contents)
    assert (other.error, other.tally, len(other.keys), len(other.key_ids)) == ("nothing", Tally(), 0, 0)


def test_a_folder_of_a_run_counts_starts_and_tells_of_its_end(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        assert [folder.count_start("a"), folder.count_start("b"), folder.count_start("a")] == [1, 1, 2]
        assert not folder.is_stopping()
        folder.ask_to_stop()
        assert folder.is_stopping()
        with RunFolder(tmp_path) as following:  # of a driver that came after a kill
            assert not following.is_stopping() and following.count_start("a") == 1
    assert folder.is_stopping()


@pytest.mark.slow
def test_processes_killed_in_mid_write_leave_no_trace_in_the_store(
    tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half written parts are no rows, and gc removes them."""
    folder = write_folder(tmp_path / "photos", 160, side=10_000)
    store_path, marks = tmp_path / "store", tmp_path / "marks"
    marks.mkdir()
    (source,) = open_sources([folder])
    local = run(folder, tmp_path / "local")
    altered = _DeadlyInMidWrite(source, marks, store_path)
    monkeypatch.setattr(
        importlib.import_module("datapipe.ingesting"), "open_sources", lambda *a, **o: [altered]
    )
    report = run(folder, store_path, engine="ray", workers=2)
    assert {int(mark.read_text()) > 2 << 20 for mark in marks.iterdir()} == {True}
    assert (report.num_added, report.num_bad) == (160, 0) == (local.num_added, local.num_bad)
    assert rows(store_path) == rows(tmp_path / "local")
    store = FeatureStore.open(store_path)
    assert len(store.snapshots()) == 2 and store.verify().ok
    assert store.gc(grace_s=0.0).bytes > 2 << 20
    assert store.verify().ok and len(store) == 160


@pytest.mark.slow
def test_a_slice_that_always_dies_ends_the_run_with_its_name(
    tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "photos", 6)
    marks = tmp_path / "marks"
    marks.mkdir()
    (source,) = open_sources([folder])
    altered = _Hopeless(source, marks)
    monkeypatch.setattr(
        importlib.import_module("datapipe.ingesting"), "open_sources", lambda *a, **o: [altered]
    )
    with pytest.raises(WorkerError, match="photos: a process that read it died 6 times"):
        run(folder, tmp_path / "store", engine="ray", workers=1)
    assert len(list(marks.iterdir())) == 6
    assert len(FeatureStore.open(tmp_path / "store")) == 0


@pytest.mark.slow
def test_a_request_to_stop_publishes_all_before_a_sample_and_nothing_behind_it(
    tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "photos", 40)
    marks = tmp_path / "marks"
    marks.mkdir()
    (source,) = open_sources([folder])
    module = importlib.import_module("datapipe.ingesting")
    with monkeypatch.context() as patch:
        patch.setattr(module, "open_sources", lambda *args, **options: [_Slow(source, marks)])
        report = run(
            folder,
            tmp_path / "store",
            engine="ray",
            workers=2,
            should_stop=lambda: len(list(marks.iterdir())) > 0,
        )
    assert report.is_interrupted and 1 <= report.num_added < 40
    names = [f"{index:04d}" for index in range(40)]
    assert FeatureStore.open(tmp_path / "store").select().keys() == names[: report.num_added]
    assert not (tmp_path / "store" / "reports" / "sources.json").exists()
    assert not (tmp_path / "store" / "reports" / "ray").exists()
    again = run(folder, tmp_path / "store", engine="ray", workers=2)
    assert (again.num_added, again.num_skipped) == (40 - report.num_added, report.num_added)
    assert FeatureStore.open(tmp_path / "store").select().keys() == names
    saved = json.loads((tmp_path / "store" / "reports" / "sources.json").read_text())
    assert list(saved) == [str(folder)]


@pytest.mark.slow
def test_pairs_of_one_picture_in_several_slices_are_all_kept(tmp_path: Path, ray_here: None) -> None:
    """Rows of several media are compared by nothing but their keys, also between slices."""
    table = tmp_path / "talks.jsonl"
    (tmp_path / "a.png").write_bytes(png(1))
    talk = {"messages": [{"role": "user", "content": "<image>What? <image>"}], "images": ["a.png", "a.png"]}
    table.write_text("\n".join(json.dumps({"key": str(n), **talk}) for n in range(8)))
    options = {"optional": ["caption"]}
    local = run(table, tmp_path / "local", **options)
    report = run(table, tmp_path / "ray", engine="ray", workers=2, commit_rows=2, **options)
    assert report.num_added == local.num_added == 16
    assert [row["key"] for row in rows(tmp_path / "ray")] == [row["key"] for row in rows(tmp_path / "local")]
