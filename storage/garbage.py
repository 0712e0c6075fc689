"""Removing what killed writers left behind."""

from __future__ import annotations

import logging
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from storage.errors import StorageError
from storage.files import fsync_directory
from storage.history import list_tags
from storage.integrity import list_files
from storage.leases import remove_unless_held
from storage.snapshots import list_snapshot_ids, read_snapshot, snapshot_path
from storage.staging import is_abandoned

__all__ = ["GcReport", "collect_garbage"]

logger = logging.getLogger("unirl.storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What was removed: paths relative to the store, and their bytes."""

    removed: list[str]
    bytes: int


def collect_garbage(root: Path, *, grace_s: float, keep_last: int | None) -> GcReport:
    """Remove old snapshots, then files that no snapshot lists.

    A file stays while it is younger than the grace period, or while its writer is alive on this machine. The
    grace period is what protects writers on other machines: it must be longer than their commits.

    Raises:
        ManifestError: If a snapshot cannot be read, because then nobody knows what it lists.
        StorageError: If keep_last is less than one.
    """
    before = time.time() - grace_s
    removed = [] if keep_last is None else _expire(root, before, keep_last)
    # In this order: what a writer publishes after its files were seen is found in the snapshots, and until
    # then its lock is found held.
    candidates, folders = _old_entries(root, before)
    live = {path.name for path in (root / "staging").iterdir() if path.is_dir() and not is_abandoned(path)}
    listed = _listed_paths(root)
    for path, size in candidates:
        relative = path.relative_to(root).as_posix()
        if relative not in listed and not any(name in relative for name in live):
            path.unlink(missing_ok=True)
            removed.append((relative, size))
    _remove_empty_folders(folders, live)
    report = GcReport(removed=sorted(name for name, _ in removed), bytes=sum(size for _, size in removed))
    logger.info("gc of %s removed %d files, %d bytes", root, len(report.removed), report.bytes)
    return report


def _expire(root: Path, before: float, keep_last: int) -> list[tuple[str, int]]:
    """Remove snapshots but the last few, those with a tag, and those that a reader holds."""
    if keep_last < 1:
        raise StorageError(f"{root}: keep_last is {keep_last}; one snapshot is the least that can be kept")
    removed = []
    for number in list_snapshot_ids(root)[:-keep_last]:
        path = snapshot_path(root, number)
        status = path.stat()
        if status.st_ctime < before and remove_unless_held(root, number, lambda: _tagged(root)):
            removed.append((path.relative_to(root).as_posix(), status.st_size))
    fsync_directory(root / "snapshots")
    return removed


def _tagged(root: Path) -> set[int]:
    return set(list_tags(root).values())


def _old_entries(root: Path, before: float) -> tuple[list[tuple[Path, int]], list[Path]]:
    """Files with their sizes, and folders of one commit, that last changed before a moment."""
    files, folders = [], []
    for top in ("index", "blobs", "tensors", "quarantine", "staging"):
        for path in (root / top).rglob("*"):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if status.st_ctime >= before:
                continue
            if not stat.S_ISDIR(status.st_mode):
                files.append((path, status.st_size))
            elif path.parent.name in ("blobs", "staging"):
                folders.append(path)
    return files, folders


def _listed_paths(root: Path) -> set[str]:
    listed: set[str] = set()
    for number in list_snapshot_ids(root):
        snapshot = read_snapshot(root, number)
        listed |= {ref.path for ref in (*snapshot.quarantine, snapshot.deleted) if ref is not None}
        for part in snapshot.parts:
            listed |= {ref.path for ref in list_files(part)}
    return listed


def _remove_empty_folders(folders: list[Path], live: set[str]) -> None:
    for folder in folders:
        if folder.is_dir() and folder.name not in live and not any(p.is_file() for p in folder.rglob("*")):
            shutil.rmtree(folder)
