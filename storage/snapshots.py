"""The directory of snapshots: find, read, and publish on top of whatever is newest."""

from __future__ import annotations

import contextlib
import difflib
import random
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from storage.errors import (
    CommitConflictError,
    ManifestError,
    SnapshotNotFoundError,
    StoreExistsError,
    StoreNotFoundError,
)
from storage.files import fsync_directory, publish_exclusively
from storage.manifest import Snapshot, decode_snapshot, encode_snapshot

__all__ = [
    "create_store",
    "list_snapshot_ids",
    "newest_snapshot",
    "publish",
    "read_snapshot",
    "snapshot_path",
]

FOLDERS = ("snapshots", "index", "blobs", "tensors", "quarantine", "staging", "tags")
_SNAPSHOT_NAME = re.compile(r"(\d{8,18})\.json")
_MAX_ATTEMPTS = 1000
_MAX_DECODED = 16

# Snapshot files never change, so those read last need not be read again; another file has another version.
_decoded: dict[tuple[str, int, int, int], Snapshot] = {}
_decoded_lock = threading.Lock()


def create_store(root: Path) -> Snapshot:
    """Make the folders and publish the empty snapshot 0.

    Raises:
        StoreExistsError: If there is a store, or a folder with other files.
    """
    if root.exists():
        if not root.is_dir():
            raise StoreExistsError(f"{root}: there is a file of this name; give another path")
        foreign = sorted({entry.name for entry in root.iterdir()} - set(FOLDERS))
        if foreign:
            raise StoreExistsError(
                f"{root}: the folder holds other files ({foreign[0]}); give an empty or new folder"
            )
        if list_snapshot_ids(root):
            raise StoreExistsError(f"{root}: there is a store already; open it, or create with exist_ok=True")
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    fsync_directory(root)
    fsync_directory(root.parent)
    empty = Snapshot(
        id=0, parent=None, created=_now(), message="create", num_rows=0, next_row=0,
        columns={}, tensors={}, parts=(), deleted=None, quarantine=(),
    )  # fmt: skip
    if not _publish_file(root, empty):
        raise StoreExistsError(f"{root}: another process created a store here; open it")
    return empty


def list_snapshot_ids(root: Path) -> list[int]:
    """Numbers of the published snapshots, ascending; empty when this is no store."""
    folder = root / "snapshots"
    if not folder.is_dir():
        return []
    return sorted(
        int(match[1]) for entry in folder.iterdir() if (match := _SNAPSHOT_NAME.fullmatch(entry.name))
    )


def read_snapshot(root: Path, snapshot_id: int) -> Snapshot:
    """Read one snapshot.

    Raises:
        StoreNotFoundError: If root holds no store; names the nearest one beside it.
        SnapshotNotFoundError: If the store has no such snapshot.
        ManifestError, FormatVersionError: If the file cannot be used.
    """
    path = snapshot_path(root, snapshot_id)
    try:
        version = _version(path)
        known = _decoded.get(version)
        if known is not None:
            return known
        content = path.read_bytes()
    except FileNotFoundError:
        ids = list_snapshot_ids(root)
        if not ids:
            raise StoreNotFoundError(_not_a_store(root)) from None
        raise SnapshotNotFoundError(
            f"{root}: there is no snapshot {snapshot_id}; the store has {ids[0]} to {ids[-1]} "
            "(gc removes old ones that have no tag)"
        ) from None
    snapshot = decode_snapshot(content, str(path))
    if snapshot.id != snapshot_id:
        raise ManifestError(
            f"{path}: the file holds snapshot {snapshot.id}; it was renamed or copied over another"
        )
    _remember(version, snapshot)
    return snapshot


def _version(path: Path) -> tuple[str, int, int, int]:
    status = path.stat()
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns


def _remember(version: tuple[str, int, int, int], snapshot: Snapshot) -> None:
    with _decoded_lock:
        _decoded[version] = snapshot
        while len(_decoded) > _MAX_DECODED:
            del _decoded[next(iter(_decoded))]


def newest_snapshot(root: Path) -> Snapshot:
    """Read the snapshot with the highest number."""
    while True:
        ids = list_snapshot_ids(root)
        if not ids:
            raise StoreNotFoundError(_not_a_store(root))
        try:
            return read_snapshot(root, ids[-1])
        except SnapshotNotFoundError:
            continue  # Newer ones were published since, and gc removed this one.
        except ManifestError as error:
            if len(ids) == 1:
                raise
            raise ManifestError(f"{error} (the one before is snapshot={ids[-2]})") from error


def publish(root: Path, build: Callable[[Snapshot], Snapshot]) -> Snapshot:
    """Publish what `build` makes of the newest snapshot; build again when another writer was faster.

    `build` raises when its change does not fit the newest snapshot; id, parent and created are set here.
    """
    for attempt in range(_MAX_ATTEMPTS):
        newest = newest_snapshot(root)
        proposed = replace(build(newest), id=newest.id + 1, parent=newest.id, created=_now())
        if _publish_file(root, proposed):
            return proposed
        time.sleep(random.SystemRandom().uniform(0, min(0.001 * 2**attempt, 0.1)))
    raise CommitConflictError(
        f"{root}: {_MAX_ATTEMPTS} other commits came first; commit again with fewer writers"
    )


def _publish_file(root: Path, snapshot: Snapshot) -> bool:
    path = snapshot_path(root, snapshot.id)
    temporary = root / "staging" / f"snapshot-{secrets.token_hex(8)}.json"
    if not publish_exclusively(path, encode_snapshot(snapshot), temporary):
        return False
    with contextlib.suppress(FileNotFoundError):
        _remember(_version(path), snapshot)
    return True


def snapshot_path(root: Path, snapshot_id: int) -> Path:
    """The file of a snapshot."""
    return root / "snapshots" / f"{snapshot_id:08d}.json"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _not_a_store(root: Path) -> str:
    reason = (
        "there is no such folder"
        if not root.exists()
        else "this is not a feature store (no snapshots/ in it)"
    )
    parent = root.absolute().parent
    stores = []
    if parent.is_dir():
        stores = [entry.name for entry in parent.iterdir() if list_snapshot_ids(entry)]
    near = difflib.get_close_matches(root.absolute().name, stores, n=1, cutoff=0.5)
    hint = (
        f"did you mean {parent / near[0]}?" if near else "create one with FeatureStore.create or unirl ingest"
    )
    return f"{root}: {reason}; {hint}"
