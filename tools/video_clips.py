"""Make small videos whose frames carry their number, and change boxes of an MP4 as broken writers do."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import av
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "add_sample_to_header",
    "box",
    "make_clip",
    "make_sound",
    "numbered_picture",
    "read_number",
    "set_edit_list",
    "set_turn",
]

_BITS: Final = 9

# Display matrices of tkhd (ISO/IEC 14496-12, 8.3.2) for clockwise turns, without the translation.
_TURNS: Final = {
    0: (1, 0, 0, 1),
    90: (0, 1, -1, 0),
    180: (-1, 0, 0, -1),
    270: (0, -1, 1, 0),
}


def numbered_picture(number: int, *, width: int = 64, height: int = 48) -> NDArray[np.uint8]:
    """A picture with `number` (below 512) as a bar code in its lower half, and one bright corner on top."""
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([(2 * x + number) % 160, (3 * y) % 160, np.full_like(x, number * 3 % 160)], -1)
    picture[: height // 4, : width // 4] = 250
    bar = width // _BITS
    for bit in range(_BITS):
        picture[height // 2 :, bit * bar : (bit + 1) * bar] = 255 * (number >> bit & 1)
    return picture.astype(np.uint8)


def read_number(picture: NDArray[np.uint8]) -> int:
    """The number of an upright picture, whatever coding did to it."""
    height, width = picture.shape[:2]
    bar = width // _BITS
    rows = picture[height * 3 // 4 - 4 : height * 3 // 4 + 4].astype(float)
    means = [rows[:, bit * bar + 2 : (bit + 1) * bar - 2].mean() for bit in range(_BITS)]
    return sum(1 << bit for bit, mean in enumerate(means) if mean > 127)


def make_clip(
    num_frames: int = 60,
    *,
    codec: str = "libx264",
    container: str = "mp4",
    width: int = 64,
    height: int = 48,
    pixel_format: str = "yuv420p",
    group: int = 250,
    b_frames: int = 3,
    times: Sequence[int] | None = None,
    time_base: Fraction = Fraction(1, 30),
    options: Mapping[str, str] | None = None,
    container_options: Mapping[str, str] | None = None,
    turn: int = 0,
    has_sound: bool = False,
    pictures: Sequence[NDArray[np.uint8]] | None = None,
) -> bytes:
    """Encode numbered pictures.

    Args:
        num_frames: Of the clip.
        codec: FFmpeg's name of the encoder.
        container: FFmpeg's name of the muxer.
        width: Pixels.
        height: Pixels.
        pixel_format: FFmpeg's name.
        group: Largest distance of key frames.
        b_frames: Largest run of frames that are stored after one that is shown later.
        times: Presentation times in units of time_base; None counts from 0.
        time_base: Seconds.
        options: Of the encoder.
        container_options: Of the muxer.
        turn: Degrees counterclockwise that the muxer writes into the display matrix.
        has_sound: Whether to add a silent AAC track.
        pictures: In place of the numbered ones, uint8 (H, W, 3), or (H, W, 4) with alpha.
    """
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=dict(container_options or {})) as output:
        stream = output.add_stream(codec, rate=30)
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        stream.codec_context.gop_size = group
        stream.codec_context.max_b_frames = b_frames
        stream.codec_context.thread_count = 1
        stream.codec_context.time_base = time_base
        if codec in ("libx264", "libx265"):
            stream.options = {"preset": "veryfast"} | dict(options or {})
        else:
            stream.options = dict(options or {})
        if turn:
            stream.set_display_rotation(turn)
        sound = output.add_stream("aac", rate=16000) if has_sound else None
        for position in range(num_frames):
            picture = (
                numbered_picture(position, width=width, height=height)
                if pictures is None
                else pictures[position]
            )
            layout = "rgba" if picture.shape[2] == 4 else "rgb24"
            frame = av.VideoFrame.from_ndarray(picture, format=layout)
            frame.pts = position if times is None else times[position]
            frame.time_base = time_base
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        if sound is not None:
            _add_silence(output, sound)
    return buffer.getvalue()


def make_sound(*, container: str = "mp4", codec: str = "aac", cover: bytes | None = None) -> bytes:
    """A file without pictures but perhaps a cover (JPEG), as music has."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        sound = output.add_stream(codec, rate=16000)
        art = None
        if cover is not None:
            art = output.add_stream("mjpeg")
            art.width, art.height, art.pix_fmt = 64, 48, "yuvj420p"
            art.disposition = av.stream.Disposition.attached_pic
        _add_silence(output, sound)
        if art is not None and cover is not None:
            packet = av.Packet(cover)
            packet.stream, packet.pts, packet.dts, packet.time_base = art, 0, 0, Fraction(1, 30)
            packet.is_keyframe = True
            output.mux(packet)
    return buffer.getvalue()


def _add_silence(output: av.container.OutputContainer, sound: av.AudioStream) -> None:
    for start in range(0, 8192, 1024):
        frame = av.AudioFrame(format="fltp", layout="stereo", samples=1024)
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        frame.sample_rate, frame.pts = 16000, start
        output.mux(sound.encode(frame))
    output.mux(sound.encode())


def box(data: bytes, path: str) -> tuple[int, int]:
    """Start (of its length field) and end of an MP4 box, such as `moov/trak/mdia`; the first of each name."""
    start, end = 0, len(data)
    for depth, name in enumerate(path.split("/")):
        at = start if depth == 0 else start + 8
        while at + 8 <= end:
            length = int.from_bytes(data[at : at + 4], "big")
            if data[at + 4 : at + 8] == name.encode():
                start, end = at, at + length
                break
            at += length
        else:
            raise KeyError(f"no box {name!r} of {path!r}")
    return start, end


def set_turn(data: bytes, degrees: int) -> bytes:
    """Overwrite the 36 bytes of the track's display matrix with a clockwise turn."""
    start, _ = box(data, "moov/trak/tkhd")
    at = start + 8 + (40 if data[start + 8] == 0 else 52)
    a, b, c, d = (value << 16 for value in _TURNS[degrees])
    matrix = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return data[:at] + matrix + data[at + 36 :]


def add_sample_to_header(data: bytes) -> bytes:
    """Make the table of sample sizes claim one sample more than there is."""
    start, _ = box(data, "moov/trak/mdia/minf/stbl/stsz")
    at = start + 16
    number = int.from_bytes(data[at : at + 4], "big") + 1
    return data[:at] + number.to_bytes(4, "big") + data[at + 4 :]


def set_edit_list(data: bytes, edits: Sequence[tuple[int, int]]) -> bytes:
    """Replace the edit list of the first track.

    Args:
        data: An MP4 whose moov stands at the end.
        edits: Pairs of duration (units of the movie's clock) and media time (units of the track's clock;
            -1 shows nothing).
    """
    rows = b"".join(struct.pack(">iiI", duration, media, 1 << 16) for duration, media in edits)
    elst = struct.pack(">I4sII", 16 + len(rows), b"elst", 0, len(edits)) + rows
    edts = struct.pack(">I4s", 8 + len(elst), b"edts") + elst
    try:
        start, end = box(data, "moov/trak/edts")
    except KeyError:
        start = end = box(data, "moov/trak/tkhd")[1]
    changed = bytearray(data[:start] + edts + data[end:])
    for parent in ("moov", "moov/trak"):
        at, stop = box(data, parent)
        changed[at : at + 4] = (stop - at + len(edts) - (end - start)).to_bytes(4, "big")
    return bytes(changed)
