"""A run's own store out of a store that somebody has, without a second copy of its bytes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Protocol, runtime_checkable

from storage import FeatureStore

__all__ = ["HasStore", "clone_store"]

NEVER_CHANGED = ("snapshots", "index", "blobs", "tensors", "quarantine")
"""Folders of a store whose files are written once."""
TAGS = "tags"


@runtime_checkable
class HasStore(Protocol):
    """Data that lies in a store already, so that there is nothing to ingest."""

    def store_path(self) -> Path:
        """Return the store's folder.

        Raises:
            ConfigError: If none was named.
        """
        ...


def clone_store(source: Path, target: Path) -> None:
    """Make a store at `target` with the snapshots of another; nothing is done if there is one.

    Files of a store never change, so they are linked where both are on one disk, and copied where not. What
    is added to one of the two is not seen by the other.

    Raises:
        StorageError: If there is no store at `source`.
    """
    if target.exists():
        return
    opened = FeatureStore.open(source)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in NEVER_CHANGED:
        if (opened.path / name).is_dir():
            shutil.copytree(opened.path / name, partial / name, copy_function=_link)
    if (opened.path / TAGS).is_dir():
        shutil.copytree(opened.path / TAGS, partial / TAGS)
    FeatureStore.open(partial)
    partial.rename(target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
