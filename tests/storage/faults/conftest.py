from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore

ROWS = 30


def make_store(path: Path) -> FeatureStore:
    """Two parts of 20 and 10 rows, one row deleted, one file refused, one tag."""
    store = FeatureStore.create(path)
    for start, stop in ((0, 20), (20, ROWS)):
        with store.writer(tensors={"x": ("int32", (4,))}) as writer:
            for i in range(start, stop):
                writer.add(f"k{i}", blob_of(i), {"x": np.full(4, i, np.int32)}, number=i, split="a")
            writer.quarantine(key=f"q{start}", place="p", reason="r", data=b"bad")
    store.delete("number = 5")
    store.tag("v1", 2)
    return store.refresh()


def blob_of(i: int) -> bytes:
    return b"blob %d" % i * 50


def use_everything(store: FeatureStore) -> None:
    """Each way of reading, and each kind of commit."""
    store = store.refresh()
    assert store.select("number = 3").column("split").to_pylist() == ["a"]
    assert store.query("SELECT DISTINCT split FROM samples").column(0).to_pylist() == ["a"]
    assert store.blob(3) == blob_of(3) and store.row("k7") == 7 and store.key(8) == "k8"
    assert store.tensor("x")[3:5][:, 0].tolist() == [3, 4]
    assert store.quarantined().num_rows == 2 and store.at("v1").row("k5") == 5
    store.append([{"key": "new", "blob": b"new", "tensors": {"x": np.zeros(4, np.int32)}, "number": ROWS}])
    store.delete("number = 6")
    store.compact()
    store.rename_column("split", "fold")
    store.tag("v2")
    store.gc(grace_s=0, keep_last=1)
    store.refresh().add_column("y", lambda view: view.rows, dtype="int64", shape=())
    newest = store.refresh()
    assert newest.verify().ok and len(newest.select("fold = 'a'")) == ROWS - 2
    last = newest.row("new")
    assert newest.tensor("y").gather(np.array([7, last])).tolist() == [7, last]


@pytest.fixture(scope="session")
def sealed(tmp_path_factory) -> Path:
    """A store that no test changes."""
    return make_store(tmp_path_factory.mktemp("sealed") / "store").path


@pytest.fixture
def copy(sealed, tmp_path) -> Path:
    """A copy of the sealed store, of which this process has read nothing."""
    return Path(shutil.copytree(sealed, tmp_path / "copy"))


@pytest.fixture(name="use_everything", scope="session")
def _use_everything() -> Callable[[FeatureStore], None]:
    return use_everything


@pytest.fixture(name="make_store", scope="session")
def _make_store() -> Callable[[Path], FeatureStore]:
    return make_store


@pytest.fixture(name="blob_of", scope="session")
def _blob_of() -> Callable[[int], bytes]:
    return blob_of
