"""Find the file that a table names, without ever leaving the folder of the table."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Final

from datapipe.errors import DecodeError
from datapipe.sources.record import Note
from datapipe.sources.remote import RemotePath, SourcePath

__all__ = [
    "IMAGE_SUFFIXES",
    "VIDEO_SUFFIXES",
    "file_loader",
    "folded_name",
    "is_unsafe_path",
    "loader_below",
    "locate_file",
    "printable",
]

_PIECE_BYTES: Final = 1 << 20

IMAGE_SUFFIXES: Final = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"),
        *(".heic", ".heif", ".mpo", ".apng", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".ico", ".qoi"),
    }
)
VIDEO_SUFFIXES: Final = frozenset(
    {
        *(".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".ts", ".mts", ".m2ts", ".mpg", ".mpeg", ".ogv"),
        *(".flv", ".wmv", ".asf", ".3gp"),
    }
)


def printable(text: str) -> str:
    """Make a path safe for messages and the index: bytes that are no UTF-8 are shown as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def folded_name(name: str) -> str:
    """A name without what systems disagree about: upper and lower case, and whether accents are composed."""
    folded = name.casefold()
    return folded if folded.isascii() else unicodedata.normalize("NFC", folded)


def is_unsafe_path(path: str) -> bool:
    """Whether a relative path is absolute, holds a drive letter, or climbs out with `..`."""
    depth = 0
    parts = PurePosixPath(path.replace("\\", "/")).parts
    if parts and (parts[0].startswith("/") or parts[0][1:2] == ":"):
        return True
    for part in parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False


def locate_file(root: SourcePath, named: str, place: str) -> tuple[SourcePath, list[Note]]:
    """Find the file that a row names, relative to root.

    Windows separators, and a spelling that differs from exactly one file in upper and lower case or in
    composed and decomposed accents only, are accepted with a note. Behind a URL nothing is looked up:
    whether the file is there turns out when it is read.

    Raises:
        DecodeError: Reasons `path_outside_folder`, `row_without_image`, `not_a_file`, and `unreadable_file`
            for a name that the system does not look up: too long, or in a folder that may not be entered.
    """
    try:
        return _locate(root, named, place)
    except OSError as error:
        raise DecodeError("unreadable_file", f"{named!r:.80}: {error.strerror or error}") from error


def _locate(root: SourcePath, named: str, place: str) -> tuple[SourcePath, list[Note]]:
    if isinstance(root, Path) and _is_plain_file(root, named):
        return root / named, []
    if not named.strip() or "\0" in named:
        raise DecodeError("row_without_image", f"the row names no file: {named!r:.80}")
    if is_unsafe_path(named):
        raise DecodeError("path_outside_folder", f"{named!r} leaves {root}; paths are relative to the table")
    if isinstance(root, RemotePath):
        return root / PurePosixPath(named.replace("\\", "/")).as_posix(), []
    notes: list[Note] = []
    path = root / named
    if "\\" in named and not path.exists():
        path = root / named.replace("\\", "/")
        notes.append(
            Note(place=place, reason="backslash_path", detail=f"{named!r} was read as {path.name!r}")
        )
    if not path.exists():
        other = _other_case(root, path)
        if other is None:
            raise DecodeError("row_without_image", f"{named!r} is not in {root}")
        notes.append(
            Note(place=place, reason="case_mismatch", detail=f"{named!r} was read as {other.name!r}")
        )
        path = other
    if not path.is_file():
        raise DecodeError("not_a_file", f"{named!r} in {root} is not a regular file")
    if not path.resolve().is_relative_to(root.resolve()):
        raise DecodeError("path_outside_folder", f"{named!r} is a link that leaves {root}")
    return path, notes


def _is_plain_file(root: Path, named: str) -> bool:
    """Whether a regular file is reached from root without links, `..` and anything else that needs a look."""
    if "\\" in named or ":" in named or "\0" in named:
        return False
    path, parts = str(root), named.split("/")
    for number, part in enumerate(parts, 1):
        if part in ("", ".", ".."):
            return False
        path = f"{path}/{part}"
        try:
            mode = os.lstat(path).st_mode
        except (OSError, ValueError):
            return False
        if not (stat.S_ISREG(mode) if number == len(parts) else stat.S_ISDIR(mode)):
            return False
    return True


def file_loader(path: SourcePath) -> Callable[[], bytes]:
    """Return a function that reads the whole file; a vanished or special file is a DecodeError."""
    return partial(_read_remote, path) if isinstance(path, RemotePath) else partial(_read_local, str(path))


def loader_below(root: SourcePath, relative: str) -> Callable[[], bytes]:
    """Like file_loader(root / relative), for a name from the listing of root."""
    if isinstance(root, RemotePath):
        return file_loader(root / relative)
    return partial(_read_local, f"{root}/{relative}")


def _read_local(path: str) -> bytes:
    try:
        # A named pipe would block for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError("not_a_file", f"{Path(path).name!r} is not a regular file")
            return _read_all(descriptor, status.st_size)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise DecodeError("not_a_file", f"{Path(path).name!r} is not a regular file") from error
        raise _unreadable(Path(path), error) from error


def _read_all(descriptor: int, size: int) -> bytes:
    data = os.read(descriptor, size + 1)
    if len(data) == size:
        return data
    pieces = [data]
    while piece := os.read(descriptor, _PIECE_BYTES):
        pieces.append(piece)
    return b"".join(pieces)


def _read_remote(path: RemotePath) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DecodeError("row_without_image", f"{path.name!r} is not there") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: SourcePath, error: OSError) -> DecodeError:
    return DecodeError("unreadable_file", f"{path.name!r}: {error.strerror or error}")


def _other_case(root: Path, path: Path) -> Path | None:
    """Follow the path from root, taking at each step the one entry that matches without case."""
    found = root
    for part in path.relative_to(root).parts:
        exact = found / part
        if exact.exists():
            found = exact
            continue
        names = _names_by_case(found).get(folded_name(part), ())
        if len(names) != 1:
            return None
        found = found / names[0]
    return found


@lru_cache(maxsize=256)
def _names_by_case(folder: Path) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    if folder.is_dir():
        for entry in folder.iterdir():
            folded = folded_name(entry.name)
            names[folded] = (*names.get(folded, ()), entry.name)
    return names
