"""A clone of a store has its rows, shares its files, and goes its own way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage import FeatureStore, StoreNotFoundError
from unirl.trainer import clone
from unirl.trainer.clone import clone_store


@pytest.fixture
def source(toy: SimpleNamespace, tmp_path: Path) -> FeatureStore:
    store = toy.make_store(tmp_path / "source")
    store.tag("mine")
    return store


def test_files_are_shared_and_rows_are_the_same(source: FeatureStore, tmp_path: Path) -> None:
    clone_store(Path(source.path), tmp_path / "runs" / "store")
    made = FeatureStore.open(tmp_path / "runs" / "store")
    assert made.snapshot.id == source.snapshot.id and made.tags() == source.tags()
    assert made.select().to_arrow() == source.select().to_arrow()
    assert bytes(made.blob(3)) == bytes(source.blob(3))
    assert made.verify().ok
    blobs = next(Path(source.path).glob("blobs/*/data.mdb"))
    assert (Path(made.path) / blobs.relative_to(source.path)).samefile(blobs)


def test_what_is_added_to_one_is_not_in_the_other(source: FeatureStore, tmp_path: Path) -> None:
    clone_store(Path(source.path), tmp_path / "clone")
    made = FeatureStore.open(tmp_path / "clone")
    made.add_column("half", lambda view: np.zeros((len(view), 2), np.float32), dtype="float32", shape=(2,))
    with source.writer(message="more") as writer:
        writer.add("new", caption="later")
    assert "half" not in source.refresh().tensor_columns and source.verify().ok
    assert len(FeatureStore.open(tmp_path / "clone")) == 32 and made.refresh().verify().ok


def test_a_clone_that_is_there_stays(source: FeatureStore, tmp_path: Path) -> None:
    clone_store(Path(source.path), tmp_path / "clone")
    source.delete("row < 10")
    clone_store(Path(source.path), tmp_path / "clone")
    assert len(FeatureStore.open(tmp_path / "clone")) == 32


def test_files_of_another_disk_are_copied(
    source: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: str) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(clone.os, "link", refuse)
    clone_store(Path(source.path), tmp_path / "clone")
    assert FeatureStore.open(tmp_path / "clone").verify().ok


def test_no_store_no_clone(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        clone_store(tmp_path / "nothing", tmp_path / "clone")
    assert list(tmp_path.iterdir()) == []
