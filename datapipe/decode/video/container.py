"""Tell a video container by its content, and whether the file holds all that it declares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import BinaryIO, Final

from datapipe.decode.sniff import AVIF_BRANDS, HEIC_BRANDS
from datapipe.decode.video.boxes import boxes_of_file
from datapipe.errors import DecodeError

__all__ = ["Container", "check_structure", "declared_codec", "sniff_container"]

_HEAD_BYTES: Final = 1024
_TS_PACKET: Final = 188

# Boxes that a QuickTime file without `ftyp` may start with.
_OLD_MOV_BOXES: Final = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
_MAGIC: Final[tuple[tuple[bytes, str, str], ...]] = (
    (b"FLV", "flv", "flv"),
    (b"OggS", "ogg", "ogg"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "asf", "asf"),
    (b"\x00\x00\x01\xba", "mpegps", "mpeg"),
    (b"ID3", "mp3", "mp3"),
    (b"\xff\xfb", "mp3", "mp3"),
    (b"\xff\xf3", "mp3", "mp3"),
    (b"fLaC", "flac", "flac"),
    (b"\xff\xf1", "aac", "aac"),
    (b"\xff\xf9", "aac", "aac"),
)
_SOUND: Final = frozenset({"mp3", "flac", "aac", "wav"})
# Boxes that stand at the top of an MP4 or MOV.
_BOXES: Final = frozenset(
    {
        *(b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"mfra", b"sidx", b"ssix", b"pdin", b"prft", b"emsg"),
        *(b"free", b"skip", b"wide", b"pnot", b"meta", b"udta", b"uuid", b"meco", b"imda"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """What the first bytes say."""

    name: str  # for the index: "mp4", "mov", "mkv", "webm", "avi", "mpegts", "mpegps", "ogg", "flv", "asf"
    demuxer: str  # FFmpeg's name, which is forced, so that a playlist cannot pose as a video
    is_sound: bool  # a format that has no video stream but at most a cover picture


def sniff_container(data: bytes | memoryview) -> Container | None:
    """Name the container from the first bytes; None for anything else, pictures in MP4 boxes included.

    Args:
        data: The file, or at least its first 1024 bytes.
    """
    head = bytes(data[:_HEAD_BYTES])
    if head[4:8] == b"ftyp":
        size = max(16, min(int.from_bytes(head[:4], "big"), len(head)))
        brands = {head[8:12], *(head[at : at + 4] for at in range(16, size - 3, 4))}
        if brands & (AVIF_BRANDS | HEIC_BRANDS):
            return None
        return _found("mov" if head[8:12] == b"qt  " else "mp4", "mov")
    if head[4:8] in _OLD_MOV_BOXES:
        return _found("mov", "mov")
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return _found("webm" if b"\x42\x82\x84webm" in head[:128] else "mkv", "matroska")
    if head[:4] == b"RIFF" and head[8:12] in (b"AVI ", b"WAVE"):
        name = "avi" if head[8:12] == b"AVI " else "wav"
        return _found(name, name)
    for start, step in ((0, _TS_PACKET), (4, _TS_PACKET + 4)):
        if len(head) > start + 2 * step and all(head[start + i * step] == 0x47 for i in range(3)):
            return _found("mpegts", "mpegts")
    return next((_found(name, demuxer) for magic, name, demuxer in _MAGIC if head.startswith(magic)), None)


def _found(name: str, demuxer: str) -> Container:
    return Container(name=name, demuxer=demuxer, is_sound=name in _SOUND)


def check_structure(file: BinaryIO, size: int, container: Container) -> None:
    """Refuse a file that ends before what it declares.

    Raises:
        DecodeError: Reasons `no_moov` (an MP4 without its index, as an interrupted download or recording
            leaves it) and `truncated`.
    """
    if container.demuxer == "mov":
        _check_boxes(file, size)
    elif container.demuxer == "avi":
        file.seek(4)
        declared = int.from_bytes(file.read(4), "little") + 8
        if declared > size:
            raise _truncated(declared, size, "the RIFF header")
    elif container.demuxer == "matroska":
        end = _segment_end(file)
        if end is not None and end > size:
            raise _truncated(end, size, "the Matroska segment")


def _check_boxes(file: BinaryIO, size: int) -> None:
    offset, names, last = 0, [], "the first box"
    for name, _, end in boxes_of_file(file, size):
        names.append(name)
        last = f"box {name.decode('latin-1')!r} at byte {offset}"
        offset = end
    if b"moov" not in names:
        held = " ".join(name.decode("latin-1") for name in names[:6])
        cut = f", and {last} ends {offset - size} bytes after the file" if offset > size else ""
        raise DecodeError(
            "no_moov",
            f"the index of the MP4 (box 'moov') is missing; found boxes {held}{cut}; "
            "the download or the recording was interrupted, fetch it again",
        )
    # What stands behind the index and the pictures and is no box was put there by somebody else.
    if offset > size and (b"mdat" not in names[:-1] or names[-1] in _BOXES):
        raise _truncated(offset, size, last)


def _segment_end(file: BinaryIO) -> int | None:
    file.seek(0)
    head = file.read(4096)
    _, at = _vint(head, 4)
    header_size, at = _vint(head, 4)
    start = at + header_size
    if head[start : start + 4] != b"\x18\x53\x80\x67":
        return None
    segment_size, body = _vint(head, start + 4)
    length = body - start - 4
    if length == 0 or segment_size == (1 << (7 * length)) - 1:
        return None  # unknown size, as in a live stream
    return body + segment_size


def _vint(data: bytes, at: int) -> tuple[int, int]:
    """An EBML number (RFC 8794, 4) and the place after it; the place itself when there is none."""
    if at >= len(data) or data[at] == 0:
        return 0, at
    length = 9 - data[at].bit_length()
    value = int.from_bytes(data[at : at + length], "big") & ((1 << (7 * length)) - 1)
    return value, at + length


def _truncated(declared: int, size: int, what: str) -> DecodeError:
    return DecodeError(
        "truncated", f"{what} declares {declared} bytes, the file has {size}; fetch the file again"
    )


def declared_codec(file: BinaryIO, container: Container) -> str:
    """What the file calls the codec of its pictures, for the message about one that cannot be decoded."""
    file.seek(0)
    data = file.read()
    found: re.Match[bytes] | None = None
    if container.demuxer == "mov":
        found = re.search(rb"vmhd.*?stsd.{12}(.{4})", data, re.DOTALL)
    elif container.demuxer == "matroska":
        found = re.search(rb"\x86[\x80-\xff](V_[A-Za-z0-9_/]+)", data[: 2**20])
    elif container.demuxer == "avi":
        found = re.search(rb"strh.{4}vids(.{4})", data[: 2**20], re.DOTALL)
    return "unknown" if found is None else repr(found.group(1).decode("latin-1").strip())
