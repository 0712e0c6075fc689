"""Ingest on a local Ray of two workers: the same rows as the local engine, whatever dies on the way."""

from __future__ import annotations

import importlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datapipe import BadFractionError, IngestReport, ingest
from datapipe.ray_slices import Slice, cut_sources
from datapipe.sources import FolderSource, open_sources
from storage import FeatureStore

pytest.importorskip("ray")


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 8, 3), dtype=np.uint8)
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


def write_folder(folder: Path, num: int) -> Path:
    folder.mkdir()
    for index in range(num):
        (folder / f"{index:04d}.png").write_bytes(png(index))
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
        return ingest(source, store, max_bad_fraction=0.0, **options)  # type: ignore[arg-type]
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


class _Deadly:
    """A folder of which two samples kill the process that reads them, the first time."""

    def __init__(self, folder: FolderSource, deaths: Path) -> None:
        self.name, self.base = folder.name, folder.base
        self._folder, self._deaths = folder, deaths

    def count(self) -> int | None:
        return self._folder.count()

    def observe_columns(self, kinds: object) -> None:
        self._folder.observe_columns(kinds)  # type: ignore[arg-type]

    def items(self) -> Iterator[object]:
        for number, item in enumerate(self._folder.items()):
            yield item
            if number in (3, 15) and self._dies_at(number):
                os._exit(9)

    def _dies_at(self, number: int) -> bool:
        try:
            (self._deaths / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@pytest.mark.slow
def test_a_request_to_stop_publishes_what_is_whole(tmp_path: Path, ray_here: None) -> None:
    folder = write_folder(tmp_path / "photos", 40)
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) > 1

    report = run(folder, tmp_path / "store", engine="ray", workers=1, should_stop=should_stop)
    assert report.is_interrupted and report.num_added < 40
    assert run(folder, tmp_path / "store", engine="ray", workers=2).num_added == 40 - report.num_added
    keys = FeatureStore.open(tmp_path / "store").select().keys()
    assert sorted(keys) == [f"{index:04d}" for index in range(40)]
    saved = json.loads((tmp_path / "store" / "reports" / "sources.json").read_text())
    assert list(saved) == [str(folder)]
