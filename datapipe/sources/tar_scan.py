"""Read the member headers of one tar, strictly: whatever would be lost in silence is a fault."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from datapipe.errors import SourceError
from datapipe.sources.paths import is_unsafe_path, printable
from datapipe.sources.record import Fault, Note

__all__ = ["TAR_ERRORS", "Member", "TarScan", "is_compressed", "open_tar", "scan_tar"]

# What tarfile and the decompressors raise on damaged archives; int() on broken PAX numbers gives ValueError.
TAR_ERRORS: Final = (
    tarfile.TarError,
    EOFError,
    OSError,
    OverflowError,
    ValueError,
    zlib.error,
    lzma.LZMAError,
)

_BLOCK: Final = tarfile.BLOCKSIZE
_CHUNK_BYTES: Final = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One regular file in a tar."""

    name: str  # with forward slashes, without a leading "./"
    offset: int  # of its header, bytes
    offset_data: int  # of its content, bytes
    size: int  # bytes


@dataclass(kw_only=True, slots=True)
class TarScan:
    """Members in archive order, and what is wrong with the archive."""

    members: list[Member] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    cut_name: str | None = None  # member whose content ends with the file


def open_tar(path: Path) -> tarfile.TarFile:
    """Open for random access; gz, bz2 and xz are told by content.

    Raises:
        SourceError: If it is no tar at all.
    """
    try:
        return tarfile.open(path, mode="r:*")
    except TAR_ERRORS as error:
        raise SourceError(f"{path}: not a readable tar ({error})") from error


def is_compressed(tar: tarfile.TarFile) -> bool:
    """Whether offsets of members are those of the decompressed stream, not of the file."""
    return isinstance(tar.fileobj, gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile)


def scan_tar(path: Path) -> TarScan:
    """Read all headers of a tar in one pass.

    Faults: `truncated_tar`, `bad_tar_header`, `data_after_end`, `unsafe_path`. The good members before a
    fault are kept.

    Raises:
        SourceError: If the file is no tar at all.
    """
    scan = TarScan()
    if path.stat().st_size == 0:
        scan.faults.append(_fault(path, 0, "empty", "the archive has 0 bytes"))
        return scan
    try:
        tar = open_tar(path)
    except SourceError as error:
        scan.faults.append(_fault(path, 0, "bad_tar_header", str(error)))
        return scan
    with tar:
        is_whole = True
        try:
            for info in _headers(tar):
                _add_member(info, path, scan)
        except TAR_ERRORS as error:
            is_whole = False
            _add_break(tar, path, scan, error)
        if is_whole:
            _check_end(tar, path, scan)
    return scan


def _headers(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (info := tar.next()) is not None:
        yield info


def _add_member(info: tarfile.TarInfo, path: Path, scan: TarScan) -> None:
    name = printable(info.name.removeprefix("./"))
    if info.isdir():
        return
    if not info.isreg() or info.issparse():
        detail = "a link, device or sparse file, not a plain file"
        scan.notes.append(
            Note(place=f"{path.name}!{name} @{info.offset}", reason="ignored_member", detail=detail)
        )
        return
    if is_unsafe_path(name):
        detail = f"member {name!r} has a path that leaves its folder; it was not read"
        scan.faults.append(_fault(path, info.offset, "unsafe_path", detail))
        return
    scan.members.append(Member(name=name, offset=info.offset, offset_data=info.offset_data, size=info.size))


def _add_break(tar: tarfile.TarFile, path: Path, scan: TarScan, error: Exception) -> None:
    """Tell a cut file from a damaged header, and drop the member that the cut went through."""
    last = scan.members[-1] if scan.members else None
    if last is not None:
        have = _num_readable(tar, last)
        if have < last.size:
            scan.members.pop()
            scan.cut_name = last.name
            detail = (
                f"cut in member {last.name!r}: {have} of its {last.size} bytes are there; "
                f"whole samples before it were read ({error})"
            )
            scan.faults.append(_fault(path, last.offset, "truncated_tar", detail))
            return
    reason = "truncated_tar" if "end of data" in str(error) else "bad_tar_header"
    detail = f"{error}; what follows was not read"
    scan.faults.append(_fault(path, tar.offset, reason, detail))


def _num_readable(tar: tarfile.TarFile, member: Member) -> int:
    file, have = tar.fileobj, 0
    if file is None:
        return 0
    try:
        file.seek(member.offset_data)
        while have < member.size:
            chunk = file.read(min(_CHUNK_BYTES, member.size - have))
            if not chunk:
                break
            have += len(chunk)
    except TAR_ERRORS:
        return have
    return have


def _check_end(tar: tarfile.TarFile, path: Path, scan: TarScan) -> None:
    """Look at what follows the last member: tarfile takes a damaged header for the end, in silence."""
    file, start = tar.fileobj, tar.offset
    if file is None:
        return
    try:
        file.seek(start)
        chunk, offset = file.read(_BLOCK), start
        if not chunk:
            detail = "no end marker; members may be missing after the last one"
            scan.notes.append(Note(place=path.name, reason="no_end_marker", detail=detail))
        while chunk and not any(chunk):
            offset += len(chunk)
            chunk = file.read(_CHUNK_BYTES)
    except TAR_ERRORS as error:
        scan.faults.append(
            _fault(path, start, "truncated_tar", f"the end of the archive is damaged: {error}")
        )
        return
    if chunk and offset == start:
        scan.faults.append(_fault(path, start, "bad_tar_header", "no header here; what follows was not read"))
    elif chunk:
        detail = "data after the end marker, as in tars joined by `cat`; they were not read"
        scan.faults.append(_fault(path, offset, "data_after_end", detail))


def _fault(path: Path, offset: int, reason: str, detail: str) -> Fault:
    return Fault(key="", place=f"{path.name} @{offset}", reason=reason, detail=detail)
