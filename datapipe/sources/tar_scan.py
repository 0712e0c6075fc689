"""Read the member headers of one tar, strictly: whatever would be lost in silence is a fault."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Final, cast

from datapipe.errors import SourceError
from datapipe.sources.compression import DAMAGE, open_plain
from datapipe.sources.paths import is_unsafe_path, printable
from datapipe.sources.record import Fault, Note
from datapipe.sources.remote import SourcePath
from datapipe.sources.tar_members import Member, Members

__all__ = ["TAR_ERRORS", "TarScan", "is_random_access", "open_tar", "scan_tar"]

# What tarfile and the decompressors raise on damaged archives. int() on broken PAX numbers gives ValueError,
# a long chain of extended headers RecursionError.
TAR_ERRORS: Final = (*DAMAGE, tarfile.TarError, OverflowError, ValueError, RecursionError)

_BLOCK: Final = tarfile.BLOCKSIZE
_CHUNK_BYTES: Final = 2**20
_MAX_HEADER_BYTES: Final = 16 * 2**20  # of one extended header: names, not contents


@dataclass(kw_only=True, slots=True)
class TarScan:
    """Members in archive order, and what is wrong with the archive."""

    members: Members = field(default_factory=Members)
    faults: list[Fault] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    cut_name: str | None = None  # member whose content ends with the file

    _by_name: dict[str, int] = field(default_factory=dict)  # filled when the first hard link comes

    def add(self, member: Member) -> None:
        self.members.add(member)
        if self._by_name:
            self._by_name[member.name] = len(self.members) - 1

    def find(self, name: str) -> Member | None:
        """The last member of a name, for hard links."""
        if not self._by_name:
            self._by_name = {self.members.name(at): at for at in range(len(self.members))}
        position = self._by_name.get(name)
        return None if position is None else self.members[position]


@contextmanager
def open_tar(path: SourcePath) -> Iterator[tarfile.TarFile]:
    """Open for seeking; gz, bz2, xz and zst are told by content.

    Raises:
        SourceError: If it is no tar at all.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_plain(path))
            tar = stack.enter_context(tarfile.open(fileobj=file, mode="r:"))
        except TAR_ERRORS as error:
            raise SourceError(f"{path}: not a readable tar ({error})") from error
        yield tar


def is_random_access(tar: tarfile.TarFile) -> bool:
    """Whether members can be read from the file itself, in any order and by several threads."""
    return isinstance(tar.fileobj, io.BufferedReader) and isinstance(tar.fileobj.raw, io.FileIO)


def scan_tar(path: SourcePath) -> TarScan:
    """Read all headers of a tar in one pass.

    Faults: `truncated_tar`, `bad_tar_header`, `data_after_end`, `unsafe_path`. The good members before a
    fault are kept.
    """
    scan = TarScan()
    try:
        with open_tar(path) as tar:
            _scan_members(tar, path, scan)
    except SourceError as error:
        if "empty file" in str(error):
            scan.faults.append(_fault(path, 0, "empty", "the archive has 0 bytes"))
        else:
            reason = "truncated_tar" if isinstance(error.__cause__, EOFError) else "bad_tar_header"
            scan.faults.append(_fault(path, 0, reason, str(error)))
    return scan


def _scan_members(tar: tarfile.TarFile, path: SourcePath, scan: TarScan) -> None:
    file = tar.fileobj
    tar.fileobj = cast(IO[bytes], _HeaderFile(cast(IO[bytes], file)))
    try:
        for info in _headers(tar):
            _add_member(info, path, scan)
    except TAR_ERRORS as error:
        tar.fileobj = file
        _add_break(tar, path, scan, error)
    else:
        tar.fileobj = file
        _check_end(tar, path, scan)


class _HeaderFile:
    """What tarfile reads headers from: a header that claims to be huge is refused before it fills memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header claims {size} bytes")
        return self._file.read(size)


def _headers(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Headers in order. Sizes below zero, which would lead tarfile in a circle, are refused."""
    before = -1
    while (info := tar.next()) is not None:
        if info.size < 0 or tar.offset <= before:
            raise tarfile.ReadError(f"member {info.name!r:.80} claims {info.size} bytes")
        before = tar.offset
        tar.members.clear()  # type: ignore[attr-defined] # tarfile would keep them all
        yield info


def _add_member(info: tarfile.TarInfo, path: SourcePath, scan: TarScan) -> None:
    name = _plain_name(info.name)
    if info.isdir():
        return
    if info.islnk() and (target := scan.find(_plain_name(info.linkname))) is not None:
        scan.add(replace(target, name=name, offset=info.offset))
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
    scan.add(Member(name=name, offset=info.offset, offset_data=info.offset_data, size=info.size))


def _add_break(tar: tarfile.TarFile, path: SourcePath, scan: TarScan, error: Exception) -> None:
    """Tell a cut file from a damaged header, and drop the member that the cut went through."""
    last = scan.members[len(scan.members) - 1] if scan.members else None
    if last is not None:
        have = _num_readable(tar, last)
        if have < last.size:
            scan.members.drop_last()
            scan.cut_name = last.name
            detail = (
                f"cut in member {last.name!r}: {have} of its {last.size} bytes are there; "
                f"whole samples before it were read ({error})"
            )
            scan.faults.append(_fault(path, last.offset, "truncated_tar", detail))
            return
    is_cut = isinstance(error, EOFError) or "end of data" in str(error)
    reason = "truncated_tar" if is_cut else "bad_tar_header"
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


def _check_end(tar: tarfile.TarFile, path: SourcePath, scan: TarScan) -> None:
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
        detail = f"the end of the archive is damaged: {error}"
        scan.faults.append(_fault(path, start, "truncated_tar", detail))
        return
    if chunk and offset == start:
        reason = "bad_tar_header" if len(chunk) >= _BLOCK else "truncated_tar"
        scan.faults.append(_fault(path, start, reason, "no header here; what follows was not read"))
    elif chunk:
        detail = "data after the end marker, as in tars joined by `cat`; they were not read"
        scan.faults.append(_fault(path, offset, "data_after_end", detail))


def _plain_name(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return printable(("/" if name.startswith("/") else "") + "/".join(parts))


def _fault(path: SourcePath, offset: int, reason: str, detail: str) -> Fault:
    return Fault(key="", place=f"{path.name} @{offset}", reason=reason, detail=detail)
