"""The directory of snapshots: find, read, and publish on top of whatever is newest."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from storage.backends.base import Backend, Lease
from storage.errors import (
    CommitConflictError,
    ManifestError,
    SnapshotNotFoundError,
    StorageError,
    StoreExistsError,
    StoreNotFoundError,
)
from storage.fork_locks import new_lock
from storage.leases import hold_snapshot, snapshot_name
from storage.manifest import Snapshot
from storage.manifest_json import decode_snapshot, encode_snapshot

__all__ = [
    "check_publishable",
    "create_store",
    "hold_newest",
    "holds_store",
    "list_snapshot_ids",
    "newest_snapshot",
    "publish",
    "read_snapshot",
    "snapshot_name",
]

FOLDERS = ("snapshots", "index", "blobs", "tensors", "quarantine", "staging", "tags")
_SNAPSHOT_NAME = re.compile(r"(\d{8,18})\.json")
_MAX_ATTEMPTS = 1000
_MAX_DECODED = 16

_Version = tuple[str, int, Hashable]

# Snapshot files never change, so those read last need not be read again; another file has another version.
_decoded: dict[_Version, Snapshot] = {}
_decoded_lock = new_lock(sys.modules[__name__], "_decoded_lock")


def holds_store(folder: Path) -> bool:
    """Whether a folder has those of a store in it. `snapshots` alone is a name that others use, too."""
    return all((folder / name).is_dir() for name in ("snapshots", "index"))


def create_store(backend: Backend) -> Snapshot:
    """Make the folders and publish the empty snapshot 0.

    Raises:
        StoreExistsError: If there is a store, or a folder with other files.
    """
    if list_snapshot_ids(backend):
        raise StoreExistsError(
            f"{backend.url}: there is a store already; open it, or create with exist_ok=True"
        )
    backend.prepare(FOLDERS)
    empty = Snapshot(
        id=0, parent=None, created=_now(), message="create", num_rows=0, next_row=0,
        columns={}, tensors={}, parts=(), deleted=None, quarantine=(),
    )  # fmt: skip
    if not _publish_file(backend, empty):
        raise StoreExistsError(f"{backend.url}: another process created a store here; open it")
    return empty


def list_snapshot_ids(backend: Backend) -> list[int]:
    """Numbers of the published snapshots, ascending; empty when this is no store."""
    return sorted(
        int(match[1]) for name in backend.names("snapshots") if (match := _SNAPSHOT_NAME.fullmatch(name))
    )


def read_snapshot(backend: Backend, snapshot_id: int) -> Snapshot:
    """Read one snapshot.

    Raises:
        StoreNotFoundError: If there is no store; names the nearest one beside it.
        SnapshotNotFoundError: If the store has no such snapshot.
        ManifestError, FormatVersionError: If the file cannot be used.
    """
    name = snapshot_name(snapshot_id)
    try:
        version = _version(backend, snapshot_id)
        known = _decoded.get(version) if version else None
        if known is not None:
            return known
        content = backend.read(name)
    except FileNotFoundError:
        ids = list_snapshot_ids(backend)
        if not ids:
            raise _not_a_store(backend) from None
        raise SnapshotNotFoundError(
            f"{backend.url}: there is no snapshot {snapshot_id}; the store has {ids[0]} to {ids[-1]} "
            "(gc removes old ones that have no tag)"
        ) from None
    snapshot = decode_snapshot(content, backend.place(name))
    if snapshot.id != snapshot_id:
        raise ManifestError(
            f"{backend.place(name)}: the file holds snapshot {snapshot.id}; it was renamed or copied over "
            "another"
        )
    _remember(version, snapshot)
    return snapshot


def _version(backend: Backend, snapshot_id: int) -> _Version | None:
    version = backend.version(snapshot_name(snapshot_id))
    return None if version is None else (backend.identity, snapshot_id, version)


def _remember(version: _Version | None, snapshot: Snapshot) -> None:
    if version is None:
        return
    with _decoded_lock:
        _decoded[version] = snapshot
        while len(_decoded) > _MAX_DECODED:
            del _decoded[next(iter(_decoded))]


def newest_snapshot(backend: Backend) -> Snapshot:
    """Read the snapshot with the highest number."""
    ids: list[int] = []
    for _ in range(_MAX_ATTEMPTS):
        ids = list_snapshot_ids(backend)
        if not ids:
            raise _not_a_store(backend)
        try:
            return read_snapshot(backend, ids[-1])
        except SnapshotNotFoundError:
            continue  # Newer ones were published since, and gc removed this one.
        except ManifestError as error:
            if len(ids) == 1:
                raise
            raise ManifestError(f"{error} (the one before is snapshot={ids[-2]})") from error
    raise SnapshotNotFoundError(
        f"{backend.url}: snapshot {ids[-1]} is listed but cannot be found; list the folder anew"
    )


def hold_newest(backend: Backend) -> tuple[Snapshot, Lease]:
    """The newest snapshot, and what keeps gc from removing it and its files."""
    for _ in range(_MAX_ATTEMPTS):
        newest = newest_snapshot(backend)
        with contextlib.suppress(SnapshotNotFoundError):
            return newest, hold_snapshot(backend, newest.id)
    raise SnapshotNotFoundError(
        f"{backend.url}: every snapshot is removed as soon as it is read; collect garbage less often"
    )


def publish(backend: Backend, build: Callable[[Snapshot], Snapshot]) -> Snapshot:
    """Publish what `build` makes of the newest snapshot; build again when another writer was faster.

    `build` raises when its change does not fit the newest snapshot; id, parent and created are set here.
    """
    for attempt in range(_MAX_ATTEMPTS):
        newest, lease = hold_newest(backend)
        proposed = replace(build(newest), id=newest.id + 1, parent=newest.id, created=_now())
        if _publish_file(backend, proposed):
            return proposed
        del lease
        time.sleep(random.SystemRandom().uniform(0, min(0.001 * 2**attempt, 0.1)))
    raise CommitConflictError(
        f"{backend.url}: {_MAX_ATTEMPTS} other commits came first; commit again with fewer writers"
    )


def check_publishable(url: str, snapshot: Snapshot) -> None:
    """Refuse what no reader would accept: a store whose newest snapshot cannot be read is of no use.

    What the caller chose is read back, which is the message and the schema; the parts are the writer's own.

    Raises:
        StorageError: If a text is no UTF-8 text, or the schema holds what a snapshot cannot say.
    """
    chosen = replace(snapshot, num_rows=0, parts=(), deleted=None, quarantine=())
    try:
        decode_snapshot(encode_snapshot(chosen), "the new snapshot")
    except (ManifestError, UnicodeEncodeError, TypeError) as error:
        raise StorageError(f"{url}: nothing was committed, as nobody could read it: {error}") from None


def _publish_file(backend: Backend, snapshot: Snapshot) -> bool:
    check_publishable(backend.url, snapshot)
    if not backend.create(snapshot_name(snapshot.id), encode_snapshot(snapshot)):
        return False
    backend.hint_newest(snapshot.id)
    with contextlib.suppress(FileNotFoundError):
        _remember(_version(backend, snapshot.id), snapshot)
    return True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _not_a_store(backend: Backend) -> StoreNotFoundError:
    return StoreNotFoundError(f"{backend.url}: {backend.absence()}")
