"""Tell what a path, a URL or a pattern holds, and open it."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final, get_args

import braceexpand

from datapipe.errors import SourceError
from datapipe.sources.compression import strip_compression
from datapipe.sources.fields import FieldMap, nearest
from datapipe.sources.folder import FolderSource
from datapipe.sources.hf_disk import hf_tables, is_hf_folder
from datapipe.sources.listing import MEDIA_SUFFIXES, METADATA_NAMES
from datapipe.sources.partitions import is_partition, partitions_of
from datapipe.sources.record import Source
from datapipe.sources.remote import RemotePath, SourcePath, is_url, open_url
from datapipe.sources.rows import TABLE_SUFFIXES, is_table
from datapipe.sources.table import TableSource
from datapipe.sources.webdataset import TAR_SUFFIXES, SplitDot, WebDatasetSource

__all__ = ["FORMATS", "open_sources"]

FORMATS: Final = ("folder", "classes", "webdataset", "table", "prompts", "hf")

# Tables that a folder of tables stands for; .json and .txt beside them may be anything.
_TABLES_IN_FOLDERS: Final = TABLE_SUFFIXES - {".json", ".txt"}


def open_sources(
    specs: Iterable[str | Path],
    *,
    format: str | None = None,
    fields: FieldMap | None = None,
    key_prefix: str | None = None,
    split_dot: SplitDot = "first",
) -> list[Source]:
    """Open every file that the paths and patterns name; each tar and each table is a source of its own.

    A source that is named twice is opened once, in the first of its places.

    Args:
        specs: Paths, URLs that fsspec knows, or patterns of them with braces (`s-{000..012}.tar`, expanded
            as WebDataset does) and stars.
        format: One of FORMATS; None tells by suffix, and by content for folders.
        fields: Names of key, image and caption in the source.
        key_prefix: Put before every key, with one slash after it. None keeps each kind's default, ""
            switches prefixes off.
        split_dot: Where a WebDataset key ends.

    Raises:
        SourceError: For a missing path, a pattern without a match, or an unknown kind.
    """
    if format is not None and format not in FORMATS:
        raise SourceError(
            f"unknown format {format!r}; wanted one of {', '.join(FORMATS)}{nearest(format, FORMATS)}"
        )
    if split_dot not in get_args(SplitDot):
        raise SourceError(f"split_dot is {split_dot!r}, wanted 'first' or 'last'")
    fields = fields or FieldMap()
    key_prefix = key_prefix and key_prefix.rstrip("/")
    sources: list[Source] = []
    try:
        for path in (path for spec in specs for path in _expand(str(spec))):
            kind = _tell_kind(path) if format is None else format
            if kind in ("folder", "classes"):
                classes = None if format is None else kind == "classes"
                sources.append(FolderSource(path, fields=fields, key_prefix=key_prefix, classes=classes))
            else:
                sources.extend(_open_files(path, kind, fields, key_prefix, split_dot))
    except OSError as error:
        raise SourceError(f"a source cannot be reached: {error}") from error
    if not sources:
        raise SourceError("no source given; name a folder, a tar or a table")
    found: dict[str, Source] = {}
    for source in sources:
        found.setdefault(source.name, source)  # patterns may overlap
    return list(found.values())


def _open_files(
    path: SourcePath, kind: str, fields: FieldMap, key_prefix: str | None, split_dot: SplitDot
) -> Iterator[Source]:
    if kind == "webdataset":
        for file in _files_of(path, TAR_SUFFIXES):
            yield WebDatasetSource(file, fields=fields, key_prefix=key_prefix, split_dot=split_dot)
    elif kind == "hf":
        yield from _open_hf(path, fields, key_prefix)
    else:
        suffixes = tuple(TABLE_SUFFIXES if kind == "prompts" else _TABLES_IN_FOLDERS)
        taken: set[str] = set()
        for file in _files_of(path, suffixes):
            parts = partitions_of(file)
            stem = "/".join([*parts.folders, PurePosixPath(strip_compression(file.name)).stem])
            # prompts.jsonl and prompts.txt may lie in one folder
            own = "/".join([*parts.folders, file.name]) if stem in taken else stem
            taken.add(stem)
            is_prompts = kind == "prompts" or file.suffix.lower() == ".txt"
            table_fields = replace(fields, is_text_only=True) if is_prompts else fields
            yield TableSource(
                file, fields=table_fields, key_prefix=key_prefix, stem=own, constants=parts.columns
            )


def _open_hf(folder: SourcePath, fields: FieldMap, key_prefix: str | None) -> Iterator[Source]:
    for table in hf_tables(folder):
        prefix = table.split if key_prefix is None else key_prefix
        constants = {} if table.split is None else {"split": table.split}
        yield TableSource(table.path, fields=fields, key_prefix=prefix, constants=constants)


def _expand(spec: str) -> list[SourcePath]:
    if not spec.strip():
        raise SourceError("the name of a source is empty; name a folder, a tar or a table; . is this folder")
    if not is_url(spec) and Path(spec).exists():
        return [Path(spec)]
    try:
        patterns = [pattern for part in spec.split("::") for pattern in braceexpand.braceexpand(part)]
    except ValueError as error:
        raise SourceError(f"{spec!r}: the braces do not match: {error}") from error
    return [path for pattern in patterns for path in _match(pattern)]


def _match(pattern: str) -> list[SourcePath]:
    """The files of one pattern without braces."""
    opened = open_url(pattern) if is_url(pattern) else Path(pattern)
    found: list[SourcePath] = [opened]
    if isinstance(opened, RemotePath):
        if any(char in opened.path for char in "*["):  # a question mark begins the query of an http URL
            found = list(opened.glob())
    elif glob.has_magic(str(opened)) and not opened.exists():
        found = [Path(path) for path in sorted(glob.glob(str(opened), recursive=True))]  # noqa: PTH207
    if not found:
        raise SourceError(f"{str(opened)!r}: no file matches this pattern")
    for path in found:
        if not path.exists():
            raise SourceError(f"{path}: no such file or folder{_nearest(path)}")
    return found


def _nearest(path: SourcePath) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else None
    except OSError:
        return ""
    if names is None:
        return f"; {path.parent} does not exist either"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _tell_kind(path: SourcePath) -> str:
    name = path.name.lower()
    if name.endswith(TAR_SUFFIXES) and not path.is_dir():
        return "webdataset"
    if is_table(name) and not path.is_dir():
        return "table"
    if path.is_dir():
        return "hf" if is_hf_folder(path) else _tell_folder_kind(path)
    raise SourceError(
        f"{path}: unknown kind of source; wanted a folder, a tar ({', '.join(TAR_SUFFIXES)}) or a table "
        f"({', '.join(sorted(TABLE_SUFFIXES))})"
    )


def _tell_folder_kind(folder: SourcePath) -> str:
    """A folder that holds only tars or only tables stands for them; all others are picture folders."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    names = [entry.name.lower() for entry in entries]
    if any(name in METADATA_NAMES or name.endswith(tuple(MEDIA_SUFFIXES)) for name in names):
        return "folder"
    folders = [entry.name for entry in entries if entry.is_dir()]
    if folders and all(is_partition(name) for name in folders):
        return "table"
    if folders:
        return "folder"
    if any(name.endswith(TAR_SUFFIXES) for name in names):
        return "webdataset"
    if any(_is_table_of_folder(name) for name in names):
        return "table"
    return "folder"


def _is_table_of_folder(name: str) -> bool:
    return is_table(name) and strip_compression(name).endswith(tuple(_TABLES_IN_FOLDERS))


def _files_of(path: SourcePath, suffixes: tuple[str, ...]) -> list[SourcePath]:
    if not path.is_dir():
        return [path]
    entries = _entries_of(path)
    files = [
        file
        for file in entries
        if file.name.lower().endswith(suffixes) or strip_compression(file.name.lower()).endswith(suffixes)
    ]
    if not files:
        raise SourceError(f"{path}: holds no file that ends with {', '.join(sorted(suffixes))}")
    return files


def _entries_of(folder: SourcePath) -> list[SourcePath]:
    """What a folder and the partitions below it hold, by name."""
    found: list[SourcePath] = [*folder.iterdir()]
    entries: list[SourcePath] = []
    for entry in sorted(found, key=lambda entry: entry.name):
        entries += _entries_of(entry) if is_partition(entry.name) and entry.is_dir() else [entry]
    return entries
