"""A kill in the middle of care leaves the store as it was, or as it shall be."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import FeatureStore


@pytest.fixture
def kills(forkserver, killed_programs) -> Callable[[str, Path, Path, int], Iterator[Path]]:
    """Gives a copy of a store after a kill at each step of an action, and at last after none."""

    def run(action: str, source: Path, path: Path, stride: int) -> Iterator[Path]:
        step = killed = 0
        while True:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(source, path)
            child = forkserver.Process(target=killed_programs.killed_at_step, args=(action, path, step))
            child.start()
            child.join()
            yield path
            if child.exitcode == 0:
                break
            assert child.exitcode == -signal.SIGKILL
            killed += 1
            step += stride
        assert killed > 2

    return run


@pytest.mark.parametrize(
    ("action", "stride", "sizes"),
    [("seal", 27, {100, 120}), ("import", 13, {100, 160}), ("compact", 17, {100})],
)
def test_all_or_nothing(filled, tmp_path, filler, kills, action, stride, sizes):
    other = filler(FeatureStore.create(tmp_path / "other"), 200, 260)
    other.export(None, tmp_path / "out", "parquet")
    for path in kills(action, filled.path, tmp_path / "copy", stride):
        store = FeatureStore.open(path)
        report = store.verify()
        assert report.ok, report.problems
        assert len(store) in sizes and store.select().keys()[:100] == [f"k{i:05d}" for i in range(100)]
        store.gc(grace_s=0)
        assert not list((path / "staging").iterdir()) and store.verify().ok
    assert len(FeatureStore.open(path)) == max(sizes)


def test_a_killed_export_has_no_name(filled, tmp_path, kills, killed_programs):
    for path in kills("export", filled.path, tmp_path / "copy", 6):
        exported = killed_programs.exported_from(path)
        if exported.exists():
            back = FeatureStore.create(tmp_path / "back", exist_ok=True)
            if not len(back):
                back.import_rows(exported)
            shutil.rmtree(exported)
    assert len(back.refresh()) == 100


def test_a_killed_repair_loses_nothing_more(filled, tmp_path, kills):
    part = filled.snapshot.parts[0]
    offset = int(filled.part(0).keys("never").blob_offset[7])
    blobs = filled.path / part.blobs.path
    blobs.chmod(0o644)
    data = bytearray(blobs.read_bytes())
    data[offset] ^= 1
    blobs.write_bytes(data)
    wanted = [f"k{i:05d}" for i in range(100) if i != 7]
    for path in kills("repair", filled.path, tmp_path / "copy", 19):
        store = FeatureStore.open(path)
        assert len(store) in (99, 100)
        copies = [file.read_bytes() for file in path.rglob("data.mdb")]
        assert bytes(data) in copies
        store.repair()
        store = store.refresh()
        assert store.verify().ok and store.select().keys() == wanted
        assert store.repair().is_whole
