"""What lies in a folder: pictures, sidecar files, metadata tables, and what is left aside."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from datapipe.errors import SourceError
from datapipe.sources.paths import IMAGE_SUFFIXES, VIDEO_SUFFIXES, is_unsafe_path, printable
from datapipe.sources.record import Fault, Note
from datapipe.sources.remote import RemotePath, SourcePath
from storage.snapshots import holds_store

__all__ = ["MEDIA_SUFFIXES", "METADATA_NAMES", "SIDECAR_SUFFIXES", "FolderListing", "list_folder"]

MEDIA_SUFFIXES: Final = IMAGE_SUFFIXES | VIDEO_SUFFIXES

SIDECAR_SUFFIXES: Final = (".txt", ".caption", ".json")
METADATA_NAMES: Final = ("metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.parquet")

# Ordinary companions of a dataset that are no captions.
_DOCUMENT_STEMS: Final = frozenset(
    {"readme", "license", "licence", "notice", "copying", "changelog", "citation", "classes", "labels"}
)


@dataclass(kw_only=True, slots=True)
class FolderListing:
    """All names below a folder, relative with forward slashes, sorted."""

    media: list[str] = field(default_factory=list)  # pictures and videos
    sidecars: dict[str, list[str]] = field(default_factory=dict)  # path without suffix -> sidecar paths
    metadata: list[str] = field(default_factory=list)  # metadata tables
    faults: list[Fault] = field(default_factory=list)  # links that leave, directories named like pictures
    notes: list[Note] = field(default_factory=list)  # files that take no part


def list_folder(root: SourcePath) -> FolderListing:
    """Walk root without following links to folders. Hidden files are skipped in silence."""
    listing = FolderListing()
    if isinstance(root, RemotePath):
        try:
            names = root.walk()
        except OSError as error:
            raise SourceError(f"{root}: cannot be listed ({error})") from error
        for relative in names:
            if is_unsafe_path(relative):
                _add_fault(listing, relative, "unsafe_path", "a name that leaves the folder; it was not read")
            elif not any(part.startswith(".") or part == "__MACOSX" for part in relative.split("/")):
                _sort_in(relative, listing)
        return listing
    if holds_store(root):
        raise SourceError(
            f"{root}: this is a feature store, not a source; `unirl export {root} FOLDER` and `unirl import` "
            "copy its rows"
        )
    real_root = root.resolve()
    for entry, relative in _walk(root, "", listing):
        _place(entry, relative, real_root, listing)
    return listing


def _walk(folder: Path, prefix: str, listing: FolderListing) -> Iterator[tuple[os.DirEntry[str], str]]:
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        if not prefix:
            raise SourceError(f"{folder}: cannot be listed ({error.strerror})") from error
        _add_fault(listing, prefix.rstrip("/"), "unreadable_folder", f"cannot be listed: {error.strerror}")
        return
    folders: list[tuple[os.DirEntry[str], str]] = []
    for entry in entries:
        relative = prefix + entry.name
        if entry.name.startswith(".") or entry.name == "__MACOSX":
            continue
        if entry.is_dir(follow_symlinks=False):
            if holds_store(Path(entry.path)):
                listing.notes.append(_note(relative, "store_not_read", "a feature store, not a source"))
                continue
            folders.append((entry, relative))
            if _suffix(relative) in MEDIA_SUFFIXES:
                _add_fault(listing, relative, "not_a_file", "a directory is named like a picture")
        elif entry.is_symlink() and stat.S_ISDIR(_mode(entry)):
            listing.notes.append(_note(relative, "link_not_followed", "a link to a folder"))
        else:
            yield entry, relative
    for entry, relative in folders:
        yield from _walk(Path(entry.path), relative + "/", listing)


def _place(entry: os.DirEntry[str], relative: str, real_root: Path, listing: FolderListing) -> None:
    if entry.is_file(follow_symlinks=False):
        _sort_in(relative, listing)
        return
    is_medium = _suffix(relative) in MEDIA_SUFFIXES
    mode = _mode(entry)
    if mode and entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(real_root):
        if is_medium:
            _add_fault(listing, relative, "path_outside_folder", "a link that leaves the folder")
        return
    if not stat.S_ISREG(mode):
        if is_medium:
            _add_fault(listing, relative, "not_a_file", "a pipe, device or dead link is named like a picture")
        return
    _sort_in(relative, listing)


def _mode(entry: os.DirEntry[str]) -> int:
    """Kind of what an entry leads to; 0 for a link to nothing or to itself."""
    try:
        return entry.stat().st_mode
    except OSError:
        return 0


def _sort_in(relative: str, listing: FolderListing) -> None:
    suffix = _suffix(relative)
    name = relative.rpartition("/")[2].lower()
    if suffix in MEDIA_SUFFIXES:
        listing.media.append(relative)
    elif name in METADATA_NAMES:
        listing.metadata.append(relative)
    elif suffix in SIDECAR_SUFFIXES and name.removesuffix(suffix) not in _DOCUMENT_STEMS:
        listing.sidecars.setdefault(relative[: -len(suffix)], []).append(relative)
    else:
        listing.notes.append(
            _note(relative, "ignored_file", "neither a picture, a video, a caption nor metadata.*")
        )


def _suffix(relative: str) -> str:
    return os.path.splitext(relative)[1].lower()  # noqa: PTH122 - a str, for speed over many names


def _add_fault(listing: FolderListing, relative: str, reason: str, detail: str) -> None:
    place = printable(relative)
    listing.faults.append(Fault(key=place, place=place, reason=reason, detail=detail))


def _note(relative: str, reason: str, detail: str) -> Note:
    return Note(place=printable(relative), reason=reason, detail=detail)
