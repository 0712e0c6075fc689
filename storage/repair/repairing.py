"""Publishing a snapshot without broken files, and putting them aside."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from storage.backends import LocalBackend
from storage.deletion import install_deleted
from storage.disk import write_errors
from storage.errors import CommitConflictError
from storage.files import fsync_directory, fsync_file
from storage.index import QuarantineWriter
from storage.integrity import Progress
from storage.leases import hold_snapshot
from storage.manifest import FileRef, Part, Snapshot
from storage.manifest_json import encode_snapshot
from storage.repair.damage import Damage, find_damage
from storage.repair.mending import mend, record_lost
from storage.repair.report import RepairReport, lost_lines
from storage.snapshots import publish, snapshot_name
from storage.staging import Staging

__all__ = ["repair_store"]

_FOLDER = "broken"


def repair_store(
    path: str | Path, *, dry_run: bool = False, progress: Progress | None = None
) -> RepairReport:
    """Check the newest snapshot of a store, and publish one that does without the broken files.

    The store need not be one that can be opened. See `FeatureStore.repair`.

    Args:
        path: Folder of the store.
        dry_run: Tell what would be done, and write nothing.
        progress: Is told the bytes of the store.

    Raises:
        StoreNotFoundError: If there is no store.
        ManifestError: If no snapshot can be read.
        CommitConflictError: If another writer changed a broken part meanwhile.
    """
    backend = LocalBackend(path)
    damage = find_damage(backend, progress)
    lease = hold_snapshot(backend, damage.base.id)
    try:
        if dry_run or not (damage.broken or damage.damaged):
            return _report(damage, None, None, ())
        return _repair(backend, damage)
    finally:
        for fix in damage.mends:
            fix.salvage.close()
        del lease


def _repair(backend: LocalBackend, damage: Damage) -> RepairReport:
    staging = Staging(backend)
    folder = f"{_FOLDER}/{staging.id}"
    try:
        with write_errors(staging.path):
            parts = [
                mend(fix, damage.base, staging, f"{staging.id}{i:04x}") for i, fix in enumerate(damage.mends)
            ]
            refused = _quarantine(staging, damage)
            names = [*damage.broken, *(snapshot_name(number) for number in damage.damaged)]
            moved = [name for name in names if _put_aside(backend, name, folder)]
            staging.flush()
            snapshot = _publish(backend, damage, parts, refused, staging)
            report = _report(damage, snapshot.id, folder, moved)
            _write_lists(backend.path / folder, report)
            for name in moved:
                backend.remove(name)
            backend.flush(moved)
            return report
    except CommitConflictError:
        staging.withdraw()
        shutil.rmtree(backend.path / folder, ignore_errors=True)
        raise
    finally:
        staging.close()


def _put_aside(backend: LocalBackend, name: str, folder: str) -> bool:
    """Give a broken file a second name in the folder of the repair; whether there is a file."""
    source, target = backend.path / name, backend.path / folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_file():
        return False
    os.link(source, target, follow_symlinks=False)
    fsync_directory(target.parent)
    return True


def _quarantine(staging: Staging, damage: Damage) -> tuple[FileRef, ...]:
    if not any(fix.lost for fix in damage.mends):
        return ()
    writer = QuarantineWriter(staging.path / "quarantine.parquet")
    for fix in damage.mends:
        record_lost(fix, writer)
    writer.close()
    return (staging.install(writer.path, f"quarantine/part-{staging.id}.parquet", writer.rows),)


def _publish(
    backend: LocalBackend,
    damage: Damage,
    parts: Sequence[Part | None],
    refused: tuple[FileRef, ...],
    staging: Staging,
) -> Snapshot:
    def build(newest: Snapshot) -> Snapshot:
        return _mended(backend, newest, damage, parts, refused, staging)

    if not damage.is_superseded:
        return publish(backend, build)
    # Beside a newest snapshot that cannot be read nobody else can publish.
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    number = damage.newest + 1
    snapshot = replace(build(damage.base), id=number, parent=damage.base.id, created=now)
    if not backend.create(snapshot_name(number), encode_snapshot(snapshot)):
        raise CommitConflictError(f"{backend.url}: another process repairs this store; look at it again")
    return snapshot


def _mended(
    backend: LocalBackend,
    newest: Snapshot,
    damage: Damage,
    made: Sequence[Part | None],
    refused: tuple[FileRef, ...],
    staging: Staging,
) -> Snapshot:
    new_parts = {fix.part.id: part for fix, part in zip(damage.mends, made)}
    changed = [fix.part.id for fix in damage.mends if fix.part not in newest.parts]
    if changed or newest.deleted != damage.base.deleted:
        raise CommitConflictError(
            f"{backend.url}: another writer changed {changed[0] if changed else 'the deleted rows'} "
            "during the repair; repair again"
        )
    parts = [new_parts.get(part.id, part) for part in newest.parts]
    kept = tuple(part for part in parts if part is not None)
    deleted = damage.deleted
    for fix in damage.mends:
        if fix.is_rewritten:
            deleted = deleted[(deleted < fix.part.first_row) | (deleted >= fix.part.end_row)]
    lost = sum(len(fix.lost) for fix in damage.mends)
    return replace(
        newest,
        message=f"repair: {lost} rows lost, {len(damage.broken)} broken files put aside",
        num_rows=sum(part.rows for part in kept) - len(deleted),
        parts=kept,
        deleted=install_deleted(staging, newest, deleted),
        quarantine=(*(ref for ref in newest.quarantine if ref.path not in damage.broken), *refused),
    )


def _report(damage: Damage, snapshot: int | None, folder: str | None, moved: Sequence[str]) -> RepairReport:
    missing: dict[str, int] = {}
    for fix in damage.mends:
        for name, count in fix.missing.items():
            missing[name] = missing.get(name, 0) + count
    return RepairReport(
        snapshot=snapshot,
        damaged_snapshots=damage.damaged,
        restored=damage.base.id if damage.is_superseded else None,
        broken=damage.broken,
        lost=[row for fix in damage.mends for row in fix.lost],
        missing={name: count for name, count in missing.items() if count},
        moved=tuple(moved),
        folder=folder,
        notes=damage.notes,
    )


def _write_lists(folder: Path, report: RepairReport) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "lost_keys.jsonl": lost_lines(report.lost),
        "report.json": json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n",
    }
    for name, content in contents.items():
        (folder / name).write_text(content, "utf-8")
        fsync_file(folder / name)
    fsync_directory(folder)
