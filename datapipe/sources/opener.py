"""Tell what a path or pattern holds, and open it."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, get_args

import braceexpand

from datapipe.errors import SourceError
from datapipe.sources.fields import FieldMap
from datapipe.sources.folder import FolderSource
from datapipe.sources.hf_disk import hf_tables, is_hf_folder
from datapipe.sources.listing import METADATA_NAMES
from datapipe.sources.paths import IMAGE_SUFFIXES
from datapipe.sources.record import Source
from datapipe.sources.rows import TABLE_SUFFIXES
from datapipe.sources.table import TableSource
from datapipe.sources.webdataset import TAR_SUFFIXES, SplitDot, WebDatasetSource

__all__ = ["FORMATS", "open_sources"]

FORMATS: Final = ("folder", "webdataset", "table", "hf")


def open_sources(
    specs: Iterable[str | Path],
    *,
    format: str | None = None,
    fields: FieldMap | None = None,
    key_prefix: str | None = None,
    split_dot: SplitDot = "first",
) -> list[Source]:
    """Open every file that the paths and patterns name; each tar and each table is a source of its own.

    Args:
        specs: Paths, or patterns with braces (`s-{000..012}.tar`, expanded as WebDataset does) and stars.
        format: `folder`, `webdataset`, `table` or `hf`; None tells by suffix, and by content for folders.
        fields: Names of key, image and caption in the source.
        key_prefix: Put before every key. None keeps each kind's default, "" switches prefixes off.
        split_dot: Where a WebDataset key ends.

    Raises:
        SourceError: For a missing path, a pattern without a match, or an unknown kind.
    """
    if format is not None and format not in FORMATS:
        near = difflib.get_close_matches(format, FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SourceError(f"unknown format {format!r}; wanted one of {', '.join(FORMATS)}{hint}")
    if split_dot not in get_args(SplitDot):
        raise SourceError(f"split_dot is {split_dot!r}, wanted 'first' or 'last'")
    fields = fields or FieldMap()
    sources: list[Source] = []
    for path in (path for spec in specs for path in _expand(str(spec))):
        kind = format or _tell_kind(path)
        if kind == "folder":
            sources.append(FolderSource(path, fields=fields, key_prefix=key_prefix))
        elif kind == "webdataset":
            sources.extend(
                WebDatasetSource(file, fields=fields, key_prefix=key_prefix, split_dot=split_dot)
                for file in _files_of(path, TAR_SUFFIXES)
            )
        elif kind == "hf":
            sources.extend(_open_hf(path, fields, key_prefix))
        else:
            suffixes = tuple(TABLE_SUFFIXES)
            sources.extend(
                TableSource(file, fields=fields, key_prefix=key_prefix) for file in _files_of(path, suffixes)
            )
    if not sources:
        raise SourceError("no source given; name a folder, a tar or a table")
    return sources


def _open_hf(folder: Path, fields: FieldMap, key_prefix: str | None) -> Iterator[Source]:
    for table in hf_tables(folder):
        prefix = table.split if key_prefix is None else key_prefix
        constants = {} if table.split is None else {"split": table.split}
        yield TableSource(table.path, fields=fields, key_prefix=prefix, constants=constants)


def _expand(spec: str) -> list[Path]:
    if Path(spec).exists():
        return [Path(spec)]
    try:
        patterns = [pattern for part in spec.split("::") for pattern in braceexpand.braceexpand(part)]
    except ValueError as error:
        raise SourceError(f"{spec!r}: the braces do not match: {error}") from error
    paths: list[Path] = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]  # noqa: PTH207
        if not found:
            raise SourceError(f"{pattern!r}: no file matches this pattern")
        paths.extend(Path(path) for path in found)
    for path in paths:
        if not path.exists():
            raise SourceError(f"{path}: no such file or folder{_nearest(path)}")
    return paths


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; {path.parent} does not exist either"
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _tell_kind(path: Path) -> str:
    name = path.name.lower()
    if path.is_dir():
        return "hf" if is_hf_folder(path) else _tell_folder_kind(path)
    if name.endswith(TAR_SUFFIXES):
        return "webdataset"
    if path.suffix.lower() in TABLE_SUFFIXES:
        return "table"
    raise SourceError(
        f"{path}: unknown kind of source; wanted a folder, a tar ({', '.join(TAR_SUFFIXES)}) or a table "
        f"({', '.join(sorted(TABLE_SUFFIXES))})"
    )


def _tell_folder_kind(folder: Path) -> str:
    """A folder that holds only tars or only tables stands for them; all others are picture folders."""
    names = [entry.name.lower() for entry in folder.iterdir() if not entry.name.startswith(".")]
    if any(name in METADATA_NAMES or name.endswith(tuple(IMAGE_SUFFIXES)) for name in names):
        return "folder"
    if any(entry.is_dir() for entry in folder.iterdir()):
        return "folder"
    if any(name.endswith(TAR_SUFFIXES) for name in names):
        return "webdataset"
    if any(name.endswith(tuple(TABLE_SUFFIXES)) for name in names):
        return "table"
    return "folder"


def _files_of(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [file for file in sorted(path.iterdir()) if file.name.lower().endswith(suffixes)]
    if not files:
        raise SourceError(f"{path}: holds no file that ends with {', '.join(suffixes)}")
    return files
