"""The file `export.json` of an exported folder: what cannot be read from the other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from storage.columns import ARROW_TYPES
from storage.errors import StorageError
from storage.manifest import TensorSpec

__all__ = ["FORMATS", "RECORD_NAME", "ExportRecord", "read_record", "write_record"]

FORMATS = ("webdataset", "parquet", "hf")
RECORD_NAME = "export.json"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """What an export holds.

    format: webdataset, parquet or hf.
    rows: how many.
    columns: metadata column -> type, as in a snapshot.
    tensors: tensor column -> dtype and shape of one row.
    blobs: image or binary, as the first of them is; None when no row has one.
    files: in the order of the rows, relative to the folder.
    """

    format: str
    rows: int
    columns: Mapping[str, str]
    tensors: Mapping[str, TensorSpec]
    blobs: str | None
    files: tuple[str, ...]

    @property
    def blob_field(self) -> str:
        """The name of the column of blobs in a table."""
        taken = {name.casefold() for name in self.columns}
        return "image" if self.blobs == "image" and "image" not in taken else "blob"


def write_record(folder: Path, record: ExportRecord) -> None:
    """Write export.json."""
    content = {"export": _VERSION, **asdict(record)}
    (folder / RECORD_NAME).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def read_record(folder: Path) -> ExportRecord:
    """Read export.json.

    Raises:
        StorageError: If the folder has none, or it was altered.
    """
    path = folder / RECORD_NAME
    try:
        fields = json.loads(path.read_bytes())
        if fields["export"] != _VERSION:
            raise ValueError(f"version {fields['export']!r}, this version of UniRL reads {_VERSION}")
        return _record(fields)
    except (FileNotFoundError, NotADirectoryError):
        raise StorageError(
            f"{folder}: this is not an exported folder (no {RECORD_NAME} in it); files from elsewhere come "
            "in with `unirl ingest`"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path}: the record of the export cannot be used: {error}; export again"
        ) from None


def _record(fields: dict[str, Any]) -> ExportRecord:
    for kind in fields["columns"].values():
        if kind not in ARROW_TYPES:
            raise ValueError(f"column type {kind!r} is unknown")
    tensors = {
        name: TensorSpec(dtype=np.dtype(spec["dtype"]).name, shape=tuple(map(int, spec["shape"])))
        for name, spec in fields["tensors"].items()
    }
    for name in fields["files"]:
        if Path(name).name != name:
            raise ValueError(f"the file {name!r} does not lie in the folder")
    if fields["format"] not in FORMATS:
        raise ValueError(f"format {fields['format']!r} is none of {', '.join(FORMATS)}")
    return ExportRecord(
        format=fields["format"],
        rows=int(fields["rows"]),
        columns=fields["columns"],
        tensors=tensors,
        blobs=fields["blobs"],
        files=tuple(fields["files"]),
    )
