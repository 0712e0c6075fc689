"""A part without its broken files: what is kept of it, what is lost, and the new part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from storage.blobs import Blob
from storage.errors import StorageError
from storage.index import QuarantineWriter
from storage.manifest import Part, Snapshot
from storage.part_builder import seal_tensor
from storage.repair.report import LostRow
from storage.repair.salvage import Salvage
from storage.rewriting import PartRows, copy_places, write_part
from storage.staging import Staging
from storage.tensors import TensorSpool

__all__ = ["Mend", "examine", "mend", "record_lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """What becomes of a part.

    keys: of each row, None where they cannot be told.
    kept, lost_rows: int64, rows of the part; rows that were deleted are in neither.
    lost: what is told about the lost rows, in their order.
    whole: tensor column -> bool (rows of its file,).
    missing: tensor column -> number of kept rows that lose their value.
    is_rewritten: whether the rows go into a new part; otherwise only tensor files are replaced.
    """

    salvage: Salvage
    keys: Sequence[bytes] | None
    numbers: np.ndarray | None
    kept: np.ndarray
    lost_rows: np.ndarray
    lost: Sequence[LostRow]
    whole: Mapping[str, np.ndarray]
    missing: Mapping[str, int]
    is_rewritten: bool

    @property
    def part(self) -> Part:
        """The part as it was."""
        return self.salvage.part


def examine(salvage: Salvage, snapshot: Snapshot, deleted: np.ndarray) -> Mend:
    """Find out what can be kept. Reads every blob if the blobs or the keys are broken; writes nothing."""
    part = salvage.part
    keys, numbers = salvage.keys(), salvage.numbers()
    live = np.arange(part.rows) if numbers is None else np.flatnonzero(~np.isin(numbers, deleted))
    reasons = _lost_reasons(salvage, live)
    lost_rows = np.array(sorted(reasons), np.int64)
    kept = np.setdiff1d(live, lost_rows, assume_unique=True)
    lost = [
        LostRow(
            key=None if keys is None else keys[row].decode(),
            row=None if numbers is None else int(numbers[row]),
            reason=reasons[row],
        )
        for row in lost_rows.tolist()
    ]
    whole = {name: salvage.whole_values(name, snapshot.tensors[name]) for name in part.tensors}
    row_file = part.row_ids.path if part.row_ids else ""
    blobs = part.blobs.path if part.blobs else ""
    return Mend(
        salvage=salvage,
        keys=keys,
        numbers=numbers,
        kept=kept,
        lost_rows=lost_rows,
        lost=lost,
        whole=whole,
        missing={name: _count_missing(salvage, name, good, kept) for name, good in whole.items()},
        is_rewritten=bool({part.index.path, part.keys.path, row_file, blobs} & salvage.broken.keys()),
    )


def _lost_reasons(salvage: Salvage, live: np.ndarray) -> dict[int, str]:
    """Row of the part -> why it is lost."""
    part = salvage.part
    if not salvage.has_index:
        return dict.fromkeys(live.tolist(), f"its metadata is lost: {salvage.broken[part.index.path]}")
    if part.blobs is None or not {part.blobs.path, part.keys.path} & salvage.broken.keys():
        return {}
    reasons = {}
    for row in live.tolist():
        try:
            salvage.blob(row)
        except StorageError as error:
            reasons[row] = f"its blob is lost: {error}"
    return reasons


def _count_missing(salvage: Salvage, name: str, good: np.ndarray, kept: np.ndarray) -> int:
    if good.all():
        return 0
    ref = salvage.part.tensors[name]
    if ref.present is None:
        return int((~good[kept]).sum())
    if ref.present.path in salvage.broken:
        return min(ref.rows, len(kept))
    held = salvage.present_rows(name)
    return int((~good[np.isin(held, kept)]).sum())


@dataclass(slots=True)
class _KeptRows(PartRows):
    """The rows that are kept, read through a salvage."""

    fix: Mend

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        assert self.fix.numbers is not None
        numbers: np.ndarray = self.fix.numbers[rows]
        return numbers

    def key(self, row: int) -> bytes:
        assert self.fix.keys is not None
        return self.fix.keys[row]

    def blob(self, row: int) -> Blob | None:
        return self.fix.salvage.blob(row)

    def copy_tensor(self, spool: TensorSpool) -> None:
        good = self.fix.whole.get(spool.name, np.zeros(0, bool))
        if not good.any():
            spool.skip(len(self.rows))
            return
        shard = self.reader.tensor(spool.name, spool.spec)
        places = shard.positions(self.rows)
        copy_places(shard, np.where((places >= 0) & good[places], places, -1), spool)


def mend(fix: Mend, snapshot: Snapshot, staging: Staging, part_id: str) -> Part | None:
    """The part that takes the place of a broken one; None when no row is left."""
    source = _KeptRows(fix.salvage.reader, fix.kept, fix)
    if fix.is_rewritten:
        return write_part(staging, part_id, snapshot, [source]) if len(fix.kept) else None
    source.rows = np.arange(fix.part.rows)
    tensors = dict(fix.part.tensors)
    for name in fix.whole:
        if fix.salvage.is_whole(name):
            continue
        del tensors[name]
        spool = TensorSpool(name, snapshot.tensors[name], staging.path / f"{part_id}-{name}.spool")
        try:
            source.copy_tensor(spool)
            file = seal_tensor(staging, spool, part_id)
        finally:
            spool.close()
        if file is not None:
            tensors[name] = file
    return replace(fix.part, tensors=tensors)


def record_lost(fix: Mend, quarantine: QuarantineWriter) -> None:
    """Put the lost rows into the quarantine, with the blob where it can still be read."""
    for row, lost in zip(fix.lost_rows.tolist(), fix.lost):
        try:
            blob = fix.salvage.blob(row) if fix.salvage.has_keys or fix.salvage.has_index else None
        except StorageError:
            blob = None
        place = f"part {fix.part.id}, row {'?' if lost.row is None else lost.row}"
        data = None if blob is None else bytes(blob)
        quarantine.add(lost.key or "", place, f"damaged: {lost.reason}", data)
