"""Removing what killed writers left behind."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from functools import partial

from storage.backends.base import Backend, StoredFile
from storage.errors import StorageError
from storage.history import list_tags
from storage.integrity import list_files
from storage.snapshots import list_snapshot_ids, read_snapshot, snapshot_name

__all__ = ["GcReport", "collect_garbage"]

_DATA_FOLDERS = ("index", "blobs", "tensors", "quarantine", "staging")

logger = logging.getLogger("unirl.storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What was removed: paths relative to the store, and their bytes."""

    removed: list[str]
    bytes: int


def collect_garbage(backend: Backend, *, grace_s: float, keep_last: int | None) -> GcReport:
    """Remove old snapshots, then files that no snapshot lists.

    A file stays while it is younger than the grace period, or while its writer is alive on this machine. The
    grace period is what protects writers on other machines: it must be longer than their commits.

    Raises:
        ManifestError: If a snapshot cannot be read, because then nobody knows what it lists.
        StorageError: If keep_last is less than one.
    """
    before = time.time() - grace_s
    with backend.exclude_collection():
        removed = [] if keep_last is None else _expire(backend, before, keep_last)
        # In this order: what a writer publishes after its files were seen is found in the snapshots, and
        # until then its lock is found held.
        candidates = [file for top in _DATA_FOLDERS for file in backend.walk(top) if file.changed < before]
        folders = backend.commit_folders(before)
        with backend.watch_writers() as live:
            listed = _listed_paths(backend)
            for file in candidates:
                if file.path not in listed and not any(writer in file.path for writer in live):
                    with contextlib.suppress(FileNotFoundError):
                        backend.remove(file.path)
                    removed.append(file)
            for folder in folders:
                if not any(writer in folder for writer in live):
                    backend.remove_empty_folder(folder)
    report = GcReport(
        removed=sorted(file.path for file in removed), bytes=sum(file.bytes for file in removed)
    )
    logger.debug("gc of %s removed %d files, %d bytes", backend.url, len(report.removed), report.bytes)
    return report


def _expire(backend: Backend, before: float, keep_last: int) -> list[StoredFile]:
    """Remove snapshots but the last few, those with a tag, and those that a reader holds."""
    if keep_last < 1:
        raise StorageError(
            f"{backend.url}: keep_last is {keep_last}; one snapshot is the least that can be kept"
        )
    files = {file.path: file for file in backend.walk("snapshots")}
    removed = []
    for number in list_snapshot_ids(backend)[:-keep_last]:
        file = files.get(snapshot_name(number))
        if file is None or file.changed >= before:
            continue
        if backend.remove_unless_held(file.path, partial(_is_tagged, backend, number)):
            removed.append(file)
    backend.flush(files)
    backend.hint_newest(list_snapshot_ids(backend)[-1])
    return removed


def _is_tagged(backend: Backend, number: int) -> bool:
    return number in list_tags(backend).values()


def _listed_paths(backend: Backend) -> set[str]:
    listed: set[str] = set()
    for number in list_snapshot_ids(backend):
        snapshot = read_snapshot(backend, number)
        listed |= {ref.path for ref in (*snapshot.quarantine, snapshot.deleted) if ref is not None}
        for part in snapshot.parts:
            listed |= {ref.path for ref in list_files(part)}
    return listed
