"""What happened to a store: the line of snapshots, what changed between two of them, and names for some."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

import numpy as np
import xxhash

from storage.backends.base import Backend
from storage.errors import ManifestError, SnapshotNotFoundError, StorageError, StoreNotFoundError
from storage.handle import unknown_name
from storage.leases import hold_snapshot
from storage.manifest import FILE_NAME, Snapshot
from storage.rows import RowMap
from storage.shards import ReaderPool
from storage.snapshots import read_snapshot

__all__ = ["SnapshotDiff", "diff_snapshots", "find_tag", "list_tags", "read_log", "remove_tag", "write_tag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDiff:
    """How snapshot `new` differs from snapshot `old`.

    rows_added, rows_removed: int64 (n,), ascending row numbers.
    columns_added, columns_removed: metadata columns.
    tensors_added, tensors_removed: tensor columns.
    """

    old: int
    new: int
    rows_added: np.ndarray
    rows_removed: np.ndarray
    columns_added: tuple[str, ...]
    columns_removed: tuple[str, ...]
    tensors_added: tuple[str, ...]
    tensors_removed: tuple[str, ...]


def diff_snapshots(pool: ReaderPool, old: Snapshot, new: Snapshot) -> SnapshotDiff:
    """Compare rows and schema; parts that both snapshots have are not read."""
    before, after = RowMap(old, pool).live_rows(), RowMap(new, pool).live_rows()
    return SnapshotDiff(
        old=old.id,
        new=new.id,
        rows_added=np.setdiff1d(after, before, assume_unique=True),
        rows_removed=np.setdiff1d(before, after, assume_unique=True),
        columns_added=tuple(name for name in new.columns if name not in old.columns),
        columns_removed=tuple(name for name in old.columns if name not in new.columns),
        tensors_added=tuple(name for name in new.tensors if name not in old.tensors),
        tensors_removed=tuple(name for name in old.tensors if name not in new.tensors),
    )


def read_log(backend: Backend, newest: Snapshot) -> list[Snapshot]:
    """A snapshot and those it was made from, newest first, as far back as they are kept."""
    log = [newest]
    with contextlib.suppress(SnapshotNotFoundError, StoreNotFoundError):
        while log[-1].parent is not None:
            log.append(read_snapshot(backend, log[-1].parent))
    return log


def write_tag(backend: Backend, name: str, snapshot_id: int) -> None:
    """Give a snapshot a name, which is kept until it is removed.

    Raises:
        StorageError: If the name is taken or cannot be that of a file.
        SnapshotNotFoundError: If there is no such snapshot.
    """
    _check_name(backend, name)
    read_snapshot(backend, snapshot_id)
    lease = hold_snapshot(backend, snapshot_id)
    fields = {"format": 2, "name": name, "snapshot": snapshot_id, "xxh3": _tag_checksum(name, snapshot_id)}
    if not backend.create(f"tags/{name}.json", json.dumps(fields).encode() + b"\n"):
        raise StorageError(
            f"{backend.url}: there is a tag {name!r} already; remove it first, or use another name"
        )
    del lease


def find_tag(backend: Backend, name: str) -> int:
    """The number of the snapshot of a tag.

    Raises:
        SnapshotNotFoundError: If there is no such tag; names the nearest.
    """
    if FILE_NAME.fullmatch(name):
        with contextlib.suppress(FileNotFoundError):
            return _tagged(name, backend.read(f"tags/{name}.json"), backend.place(f"tags/{name}.json"))
    raise SnapshotNotFoundError(unknown_name("tag", name, list(list_tags(backend)), backend.url))


def list_tags(backend: Backend) -> dict[str, int]:
    """Tag -> number of its snapshot."""
    tags = {}
    for name in sorted(backend.names("tags")):
        stem, dot, suffix = name.rpartition(".")
        if suffix != "json" or not dot:
            continue
        with contextlib.suppress(FileNotFoundError):
            tags[stem] = _tagged(stem, backend.read(f"tags/{name}"), backend.place(f"tags/{name}"))
    return tags


def _tagged(name: str, content: bytes, place: str) -> int:
    """The snapshot of a tag; a flipped bit must not turn it into another one."""
    try:
        fields = json.loads(content)
        kind, number, found = fields["format"], fields["snapshot"], fields["name"]
        checksum = fields["xxh3"] if kind == 2 else None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _damaged(place, str(error)) from None
    if type(kind) is not int or kind not in (1, 2) or type(number) is not int or number < 0:
        raise _damaged(place, f"it names snapshot {str(number)[:40]} in format {str(kind)[:40]}")
    if found != name or (kind == 2 and checksum != _tag_checksum(name, number)):
        raise _damaged(place, "its content was altered, or is that of another tag")
    return number


def _damaged(place: str, reason: str) -> ManifestError:
    return ManifestError(f"{place}: the tag is damaged: {reason}; remove the file and tag again")


def _tag_checksum(name: str, snapshot_id: int) -> str:
    return xxhash.xxh3_128_hexdigest(f"{name}\n{snapshot_id}".encode())


def remove_tag(backend: Backend, name: str) -> None:
    """Forget a tag; its snapshot stays.

    Raises:
        StorageError: If there is no such tag.
    """
    _check_name(backend, name)
    try:
        backend.remove(f"tags/{name}.json")
    except FileNotFoundError:
        known = ", ".join(list_tags(backend)) or "none"
        raise StorageError(f"{backend.url}: there is no tag {name!r}; there are {known}") from None
    backend.flush([f"tags/{name}.json"])


def _check_name(backend: Backend, name: str) -> None:
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        raise StorageError(
            f"{backend.url}: tag {name!r} cannot be used: a name has 1 to 128 letters, digits, '_', '-' and "
            "'.', and does not begin with '-' or '.'"
        )
