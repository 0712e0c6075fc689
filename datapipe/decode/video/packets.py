"""Where decoding may start: key frames after which no picture needs one from before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from av.packet import Packet

__all__ = ["PacketLog", "is_unreferred", "nal_length_bytes"]

_H264_SEI, _H264_IDR = 6, 5
_H264_SLICES: Final = (1, 2, 5)
_HEVC_ENTRY: Final = range(16, 22)  # BLA, IDR and CRA pictures; frames shown after them need nothing before
_RECOVERY_POINT: Final = 6


class PacketLog:
    """Notes the times of packets and of entry points while a stream is demuxed."""

    def __init__(self, codec: str, extradata: bytes | None) -> None:
        self._codec = codec
        self._length_bytes = nal_length_bytes(codec, extradata)
        self._pts: list[int] = []
        self._entries: list[int] = []
        self.num_packets = 0  # that should give a frame
        self.num_discarded = 0  # left out by an edit list
        self.num_open_entries = 0  # key frames that frames after them may reach across
        self.num_leading = 0  # frames stored after a key frame and shown before it
        self._has_gaps = False  # packets without a time

    def add_packet(self, packet: Packet[Any]) -> None:
        """Note one packet of PyAV."""
        self.add(packet.pts, packet.is_keyframe, packet.is_discard, lambda: bytes(packet))

    def add(self, pts: int | None, is_key: bool, is_discard: bool, read: Callable[[], bytes]) -> None:
        """Note one packet.

        Args:
            pts: When its frame is shown; None when the container does not say.
            is_key: Whether the container marks it as a key frame.
            is_discard: Whether an edit list leaves it out.
            read: Gives its first bytes; asked for key frames only.
        """
        if is_discard:
            self.num_discarded += 1
        else:
            self.num_packets += 1
        if pts is None:
            self._has_gaps = True
            return
        if not is_discard:
            self._pts.append(pts)
        if self._entries and pts < self._entries[-1]:
            self.num_leading += 1
        if is_key:
            if self._is_entry(read()):
                self._entries.append(pts)
            else:
                self.num_open_entries += 1

    @property
    def is_indexable(self) -> bool:
        """Whether each packet has a time of its own, so that times name frames."""
        return not self._has_gaps and len(set(self._pts)) == len(self._pts) and self._entries_increase()

    @property
    def pts(self) -> NDArray[np.int64]:
        """Times of the packets that should be shown, sorted."""
        return np.sort(np.array(self._pts, dtype=np.int64))

    @property
    def entry_pts(self) -> NDArray[np.int64]:
        """Times of the frames where decoding may start, int64 (E,), in the order of the packets."""
        return np.array(self._entries, dtype=np.int64)

    def _entries_increase(self) -> bool:
        return all(left < right for left, right in pairwise(self._entries))

    def _is_entry(self, data: bytes) -> bool:
        if self._codec == "h264":
            return any(_is_h264_entry(nal) for nal in _nals(data, self._length_bytes))
        if self._codec == "hevc":
            return any((nal[0] >> 1) & 0x3F in _HEVC_ENTRY for nal in _nals(data, self._length_bytes))
        return True


def is_unreferred(packet: Packet[Any], length_bytes: int) -> bool:
    """Whether no other H.264 picture depends on this one (H.264, 7.4.1: nal_ref_idc is 0)."""
    for nal in _nals(bytes(packet), length_bytes):
        if nal[0] & 0x1F in _H264_SLICES:
            return nal[0] & 0x60 == 0
    return False


def nal_length_bytes(codec: str, extradata: bytes | None) -> int:
    """Bytes of the length before each unit of a packet; 0 for streams with start codes."""
    extradata = extradata or b""
    if codec == "h264" and extradata[:1] == b"\x01" and len(extradata) > 4:
        return (extradata[4] & 3) + 1
    if codec == "hevc" and len(extradata) > 21 and extradata[:3] not in (b"\x00\x00\x00", b"\x00\x00\x01"):
        return (extradata[21] & 3) + 1
    return 0


def _is_h264_entry(nal: bytes) -> bool:
    """An IDR picture, or a recovery point from which the output is exact at once (H.264, D.2.8)."""
    kind = nal[0] & 0x1F
    if kind == _H264_IDR:
        return True
    if kind != _H264_SEI or len(nal) < 4 or nal[1] != _RECOVERY_POINT:
        return False
    # recovery_frame_cnt as an Exp-Golomb 0 is the bit 1; exact_match_flag follows it.
    return nal[3] & 0xC0 == 0xC0


def _nals(data: bytes, length_bytes: int) -> Iterator[bytes]:
    """The first bytes of each unit of a packet."""
    at = 0
    if length_bytes:
        while at + length_bytes < len(data):
            size = int.from_bytes(data[at : at + length_bytes], "big")
            at += length_bytes
            if size:
                yield data[at : at + min(size, 64)]
            at += size
        return
    while (at := data.find(b"\x00\x00\x01", at)) >= 0:
        at += 3
        if at < len(data):
            yield data[at : at + 64]
