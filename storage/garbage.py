"""Removing what killed writers left behind."""

from __future__ import annotations

import logging
import shutil
import stat
import time
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

    A file stays while it is younger than the grace period, or while its writer is alive on this machine. The
    grace period is what protects writers on other machines: it must be longer than their commits.

    Raises:
        ManifestError: If a snapshot cannot be read, because then nobody knows what it lists.
    """
    # In this order: what a writer publishes after its files were seen is found in the snapshots, and until
    # then its lock is found held.
    candidates, folders = _old_entries(root, time.time() - grace_s)
    live = {path.name for path in (root / "staging").iterdir() if path.is_dir() and not is_abandoned(path)}
    listed = _listed_paths(root)
    removed, num_bytes = [], 0
    for path, size in candidates:
        relative = path.relative_to(root).as_posix()
        if relative not in listed and not any(name in relative for name in live):
            path.unlink(missing_ok=True)
            removed.append(relative)
            num_bytes += size
    _remove_empty_folders(folders, live)
    logger.info("gc of %s removed %d files, %d bytes", root, len(removed), num_bytes)
    return GcReport(removed=sorted(removed), bytes=num_bytes)


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
