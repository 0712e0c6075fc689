"""A kill in the middle of care leaves the store as it was, or as it shall be."""

from __future__ import annotations

import importlib.util
import multiprocessing
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import FeatureStore

_NAME = "killed_care"
_spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name(f"{_NAME}.py"))
killed_care = importlib.util.module_from_spec(_spec)
sys.modules[_NAME] = killed_care
_spec.loader.exec_module(killed_care)


@pytest.fixture(scope="module")
def forkserver():
    """Children that start in milliseconds and have no threads of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.syspath_prepend(str(Path(__file__).parent))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_NAME])
        yield context


def kills(forkserver, action: str, source: Path, path: Path, stride: int) -> Iterator[Path]:
    """A copy of the store after a kill at each step, and at last after none."""
    step = killed = 0
    while True:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path)
        child = forkserver.Process(target=killed_care.killed_at_step, args=(action, path, step))
        child.start()
        child.join()
        yield path
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        killed += 1
        step += stride
    assert killed > 2


@pytest.mark.parametrize(
    ("action", "stride", "sizes"),
    [("seal", 27, {100, 120}), ("import", 13, {100, 160}), ("compact", 17, {100})],
)
def test_all_or_nothing(filled, tmp_path, filler, forkserver, action, stride, sizes):
    other = filler(FeatureStore.create(tmp_path / "other"), 200, 260)
    other.export(None, tmp_path / "out", "parquet")
    for path in kills(forkserver, action, filled.path, tmp_path / "copy", stride):
        store = FeatureStore.open(path)
        report = store.verify()
        assert report.ok, report.problems
        assert len(store) in sizes and store.select().keys()[:100] == [f"k{i:05d}" for i in range(100)]
        store.gc(grace_s=0)
        assert not list((path / "staging").iterdir()) and store.verify().ok
    assert len(FeatureStore.open(path)) == max(sizes)


def test_a_killed_export_has_no_name(filled, tmp_path, forkserver):
    for path in kills(forkserver, "export", filled.path, tmp_path / "copy", 6):
        if (path / "exported").exists():
            back = FeatureStore.create(tmp_path / "back", exist_ok=True)
            if not len(back):
                back.import_rows(path / "exported")
    assert len(back.refresh()) == 100


def test_a_killed_repair_loses_nothing_more(filled, tmp_path, forkserver):
    part = filled.snapshot.parts[0]
    offset = int(filled.part(0).keys("never").blob_offset[7])
    blobs = filled.path / part.blobs.path
    blobs.chmod(0o644)
    data = bytearray(blobs.read_bytes())
    data[offset] ^= 1
    blobs.write_bytes(data)
    wanted = [f"k{i:05d}" for i in range(100) if i != 7]
    for path in kills(forkserver, "repair", filled.path, tmp_path / "copy", 19):
        store = FeatureStore.open(path)
        assert len(store) in (99, 100)
        copies = [file.read_bytes() for file in path.rglob("data.mdb")]
        assert bytes(data) in copies
        store.repair()
        store = store.refresh()
        assert store.verify().ok and store.select().keys() == wanted
        assert store.repair().is_whole
