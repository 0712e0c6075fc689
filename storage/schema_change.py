"""Dropping and renaming columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from storage.columns import ColumnTypes
from storage.disk import write_errors
from storage.errors import ColumnError
from storage.index import COMPRESSION
from storage.leases import hold_snapshot
from storage.manifest import FileRef, Part, Snapshot
from storage.shards import ReaderPool
from storage.snapshots import publish
from storage.staging import Staging
from storage.tensors import tensor_spec

__all__ = ["drop_column", "rename_column"]

Column = TypeVar("Column")


def drop_column(pool: ReaderPool, name: str, message: str) -> Snapshot:
    """Publish a snapshot without a metadata or tensor column; earlier snapshots keep it."""
    return _change(pool, name, None, message)


def rename_column(pool: ReaderPool, name: str, new_name: str, message: str) -> Snapshot:
    """Publish a snapshot in which a metadata or tensor column has another name."""
    return _change(pool, name, new_name, message)


def _change(pool: ReaderPool, name: str, new_name: str | None, message: str) -> Snapshot:
    staging = Staging(pool.backend)
    rewritten: dict[str, FileRef] = {}

    def build(newest: Snapshot) -> Snapshot:
        _check(pool.backend.url, newest, name, new_name)
        if name in newest.tensors:
            parts = tuple(
                replace(part, tensors=_renamed(part.tensors, name, new_name)) for part in newest.parts
            )
            return replace(
                newest, message=message, tensors=_renamed(newest.tensors, name, new_name), parts=parts
            )
        lease = hold_snapshot(pool.backend, newest.id)
        for part in newest.parts:
            if part.index.path not in rewritten:
                with write_errors(staging.path):
                    rewritten[part.index.path] = _rewrite_index(pool, part, staging, name, new_name)
        staging.flush()
        del lease
        parts = tuple(replace(part, index=rewritten[part.index.path]) for part in newest.parts)
        return replace(newest, message=message, columns=_renamed(newest.columns, name, new_name), parts=parts)

    try:
        return publish(pool.backend, build)
    except ColumnError:
        staging.withdraw()
        raise
    finally:
        staging.close()


def _check(url: str, snapshot: Snapshot, name: str, new_name: str | None) -> None:
    if name not in snapshot.columns and name not in snapshot.tensors:
        known = ", ".join([*snapshot.columns, *snapshot.tensors]) or "none"
        raise ColumnError(f"{url}: there is no column {name!r} to change; there are {known}")
    if new_name is None:
        return
    if name in snapshot.tensors:
        tensor_spec(new_name, snapshot.tensors[name].dtype, snapshot.tensors[name].shape)
        taken = new_name in snapshot.tensors
    else:
        others = {other: (spec.type, "") for other, spec in snapshot.columns.items() if other != name}
        ColumnTypes(others, {new_name: "json"} if new_name not in others else {})
        taken = new_name in others
    if taken:
        raise ColumnError(
            f"{url}: there is a column {new_name!r} already; drop it first, or use another name"
        )


def _renamed(columns: Mapping[str, Column], name: str, new_name: str | None) -> dict[str, Column]:
    renamed = {new_name if held == name else held: value for held, value in columns.items()}
    return {held: value for held, value in renamed.items() if held is not None}


def _rewrite_index(
    pool: ReaderPool, part: Part, staging: Staging, name: str, new_name: str | None
) -> FileRef:
    """The index of a part with the column dropped or renamed; the same file when the part lacks it."""
    target = staging.path / "index.parquet"
    with pq.ParquetFile(pool.get(part).check_index("always")) as file:
        old_schema = file.schema_arrow
        if name not in old_schema.names:
            return part.index
        kept = [field for field in old_schema if field.name != name or new_name is not None]
        fields = [field.with_name(new_name) if field.name == name else field for field in kept]
        schema = pa.schema(fields)
        with pq.ParquetWriter(target, schema, compression=COMPRESSION, write_page_checksum=True) as writer:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=[field.name for field in kept])
                writer.write_table(table.rename_columns(schema.names), row_group_size=table.num_rows)
    return staging.install(target, f"index/part-{part.id}-{staging.id}.parquet", part.rows)
