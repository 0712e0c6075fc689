"""Sealed parts: rows that are written but not published, and the commit of any number of them at once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

import numpy as np

from storage.columns import check_same_types
from storage.errors import (
    CommitConflictError,
    DuplicateKeyError,
    ManifestError,
    SnapshotNotFoundError,
    TensorColumnError,
)
from storage.integrity import list_files
from storage.keys import KeyTable
from storage.manifest import (
    ColumnSpec,
    FileRef,
    Snapshot,
    TensorSpec,
)
from storage.manifest_json import decode_snapshot, encode_snapshot
from storage.shards import PartReader, ReaderPool
from storage.snapshots import newest_snapshot, publish, read_snapshot

__all__ = ["SealedPart", "check_tensor_spec", "column_origins", "publish_parts", "put_on_top"]

_ID = re.compile(r"[0-9a-z]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedPart:
    """What one part writer wrote. Its files lie in the store, but no snapshot lists them yet.

    id: names its files.
    content: a snapshot that holds these rows alone, numbered from 0. Its parent is the snapshot whose keys
        and types they were checked against.
    """

    id: str
    content: Snapshot

    def __len__(self) -> int:
        return self.content.num_rows

    def files(self) -> list[FileRef]:
        """All files of the part."""
        files = [ref for part in self.content.parts for ref in list_files(part)]
        return files + list(self.content.quarantine)

    def to_json(self) -> str:
        """The record as text, to be carried to the process that publishes it."""
        return json.dumps({"sealed": self.id, "content": encode_snapshot(self.content).decode()})

    @classmethod
    def from_json(cls, text: str) -> SealedPart:
        """Read what `to_json` wrote.

        Raises:
            ManifestError, FormatVersionError: If it is anything else, or was altered.
        """
        try:
            fields = json.loads(text)
            part_id, content = fields["sealed"], fields["content"].encode()
            if not _ID.fullmatch(part_id):
                raise ValueError(f"the id {part_id!r} cannot be that of a part")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(
                f"this is not the record of a sealed part ({error}); give what to_json() returned"
            ) from None
        return cls(id=part_id, content=decode_snapshot(content, f"sealed part {part_id}"))


def publish_parts(readers: ReaderPool, sealed: Sequence[SealedPart], message: str) -> Snapshot:
    """Publish sealed parts in one snapshot, in the order given, or none of them.

    Raises:
        DuplicateKeyError: If two rows have one key; names both places.
        ColumnError, ColumnTypeError, TensorColumnError: If the columns of two parts, or of a part and the
            store, do not fit each other.
        CommitConflictError: If a part is given twice or was published before.
        MissingShardError: If gc removed a part that was not published within the grace period.
    """
    for number, one in enumerate(sealed):
        if one.id in {other.id for other in sealed[:number]}:
            raise CommitConflictError(f"sealed part {one.id} is given twice; give every part once")
    with readers.backend.exclude_collection():
        for one in sealed:
            for ref in one.files():
                os.close(readers.backend.open_shard(ref))
        return put_on_top(readers, sealed, message)


def put_on_top(readers: ReaderPool, sealed: Sequence[SealedPart], message: str) -> Snapshot:
    """Publish sealed parts whose files are known to stay; without any rows or refusals, nothing."""
    if not any(one.files() for one in sealed):
        return newest_snapshot(readers.backend)
    # Not from the pool: the rows of these parts have no numbers yet.
    mine = [[PartReader(readers.backend, part) for part in one.content.parts] for one in sealed]
    _refuse_repeated_keys(list(chain.from_iterable(mine)))

    def build(newest: Snapshot) -> Snapshot:
        known = {part.id for part in newest.parts}
        result = newest
        for one, parts in zip(sealed, mine):
            if one.id in known:
                raise CommitConflictError(
                    f"{readers.backend.url}: part {one.id} is published already; leave it out"
                )
            _refuse_known_keys(readers, parts, newest, _checked_parts(readers, one, newest))
            result = _with_part(result, one)
        return replace(result, message=message)

    return publish(readers.backend, build)


def _with_part(newest: Snapshot, sealed: SealedPart) -> Snapshot:
    """The snapshot with the rows of a part after its own."""
    content = sealed.content
    place = f"part {sealed.id}"
    check_same_types(
        {name: (spec.type, place) for name, spec in content.columns.items()}, column_origins(newest)
    )
    for name, tensor in content.tensors.items():
        check_tensor_spec(name, tensor, newest, place)
    columns = dict(newest.columns)
    for name, spec in content.columns.items():
        if name not in columns or columns[name].type == "null":
            columns[name] = ColumnSpec(type=spec.type, since=sealed.id)
    first = newest.next_row
    placed = tuple(
        replace(part, first_row=first + part.first_row, end_row=first + part.end_row)
        for part in content.parts
    )
    return replace(
        newest,
        num_rows=newest.num_rows + content.num_rows,
        next_row=first + content.next_row,
        columns=columns,
        tensors={**content.tensors, **newest.tensors},
        parts=(*newest.parts, *placed),
        quarantine=newest.quarantine + content.quarantine,
    )


def _refuse_repeated_keys(parts: Sequence[PartReader]) -> None:
    """Keys are unique within each part; they must be so over all of them."""
    if len(parts) < 2:
        return
    tables = [reader.keys("first-read") for reader in parts]
    hashes = np.sort(np.concatenate([np.empty(0, np.uint64), *(table.sorted_hash for table in tables)]))
    for shared in np.unique(hashes[1:][hashes[1:] == hashes[:-1]]).tolist():
        seen: dict[bytes, str] = {}
        for reader, table in zip(parts, tables):
            for row in table.rows_of_hash(shared).tolist():
                key, place = table.encoded_key(row), f"row {row} of part {reader.part.id}"
                if key in seen:
                    raise DuplicateKeyError(
                        f"{place}, key {key.decode()!r}: {seen[key]} has this key too; nothing was committed"
                    )
                seen[key] = place


def _refuse_known_keys(
    readers: ReaderPool, parts: Sequence[PartReader], newest: Snapshot, checked: set[str]
) -> None:
    """The keys of new parts against those of the parts that their writer has not seen."""
    others = [part for part in newest.parts if part.id not in checked]
    deleted = readers.deleted_rows(newest) if others else np.empty(0, np.int64)
    for mine, other in product(parts, others):
        theirs = readers.get(other)
        table = mine.keys("first-read")
        for row, local in _shared_keys(table, theirs.keys("first-read")):
            number = int(theirs.global_rows(np.array([local]))[0])
            if not np.isin(number, deleted):
                raise DuplicateKeyError(
                    f"row {row} of part {mine.part.id}, key {table.key(row)!r}: another writer published it "
                    f"meanwhile as row {number} of {readers.backend.url} (snapshot {newest.id}); "
                    "nothing was committed"
                )


def _checked_parts(readers: ReaderPool, sealed: SealedPart, newest: Snapshot) -> set[str]:
    """The parts that the writer of a part saw, unless a deleted row of them came back since."""
    if sealed.content.parent is None:
        return set()
    try:
        base = read_snapshot(readers.backend, sealed.content.parent)
    except SnapshotNotFoundError:
        return set()
    if base.deleted is not None and base.deleted != newest.deleted:
        gone = readers.deleted_rows(newest)
        if not np.isin(readers.deleted_rows(base), gone).all():
            return set()
    return {part.id for part in base.parts}


def _shared_keys(mine: KeyTable, theirs: KeyTable) -> Iterator[tuple[int, int]]:
    """Row of `mine` and row of `theirs` for each key that both have."""
    for shared in np.unique(theirs.shared_hashes(mine.sorted_hash)).tolist():
        for row in mine.rows_of_hash(shared).tolist():
            local = theirs.find(mine.encoded_key(row), shared)
            if local is not None:
                yield row, local


def check_tensor_spec(name: str, spec: TensorSpec, snapshot: Snapshot, place: str) -> None:
    """Refuse a tensor column that the snapshot has with another dtype or shape."""
    known = snapshot.tensors.get(name)
    if known is not None and known != spec:
        raise TensorColumnError(
            f"tensor column {name!r} is {spec.dtype}{spec.shape} in {place}, but {known.dtype}{known.shape} "
            f"in snapshot {snapshot.id} or a part before it; convert it, or use another name"
        )


def column_origins(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    """Column -> type and where it was set, as text for errors."""
    rows = {part.id: part.first_row for part in snapshot.parts}
    return {
        name: (spec.type, f"part {spec.since}" + (f" (row {rows[spec.since]})" if spec.since in rows else ""))
        for name, spec in snapshot.columns.items()
    }
