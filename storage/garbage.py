"""Removing what killed writers left behind."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from storage.integrity import list_files
from storage.snapshots import list_snapshot_ids, read_snapshot
from storage.staging import is_abandoned

__all__ = ["GcReport", "collect_garbage"]

logger = logging.getLogger("unirl.storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What was removed: paths relative to the store, and their bytes."""

    removed: list[str]
    bytes: int


def collect_garbage(root: Path, *, grace_s: float) -> GcReport:
    """Remove files that no snapshot lists.

    A file stays while it is younger than the grace period, or while the writer that makes it is alive on
    this machine.
    The grace period is what protects writers on other machines: it must be longer than their longest commit.

    Raises:
        ManifestError: If a snapshot cannot be read, because then nobody knows what it lists.
    """
    live = {
        folder.name for folder in (root / "staging").iterdir() if folder.is_dir() and not is_abandoned(folder)
    }
    # Candidates are listed before the snapshots are read, so what is published in between counts as listed.
    candidates = list(_old_files(root, time.time() - grace_s))
    listed = _listed_paths(root)
    removed, num_bytes = [], 0
    for path in candidates:
        relative = path.relative_to(root).as_posix()
        if relative in listed or any(name in relative for name in live):
            continue
        num_bytes += path.lstat().st_size
        path.unlink()
        removed.append(relative)
    _remove_empty_folders(root, live)
    logger.info("gc of %s removed %d files, %d bytes", root, len(removed), num_bytes)
    return GcReport(removed=sorted(removed), bytes=num_bytes)


def _old_files(root: Path, before: float) -> Iterator[Path]:
    for folder in ("index", "blobs", "tensors", "quarantine", "staging"):
        for path in (root / folder).rglob("*"):
            if not path.is_dir() and path.lstat().st_ctime < before:
                yield path


def _listed_paths(root: Path) -> set[str]:
    listed: set[str] = set()
    for number in list_snapshot_ids(root):
        snapshot = read_snapshot(root, number)
        listed |= {ref.path for ref in snapshot.quarantine}
        for part in snapshot.parts:
            listed |= {ref.path for ref in list_files(part)}
    return listed


def _remove_empty_folders(root: Path, live: set[str]) -> None:
    for folder in ("blobs", "staging"):
        for path in (root / folder).iterdir():
            if (
                path.is_dir()
                and path.name not in live
                and not any(entry.is_file() for entry in path.rglob("*"))
            ):
                shutil.rmtree(path)
