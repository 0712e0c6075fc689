"""Open a video with PyAV: the right stream, one decoding thread, and errors with stable reasons."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, BinaryIO, Final

from datapipe.decode.image import DEFAULT_MAX_PIXELS
from datapipe.decode.sniff import sniff_image_format
from datapipe.decode.video.container import Container, check_structure, declared_codec, sniff_container
from datapipe.decode.video.info import StreamFacts
from datapipe.decode.video.packages import import_av
from datapipe.decode.video.source import VideoSource, open_source
from datapipe.errors import DecodeError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

__all__ = ["OpenVideo", "open_video"]

_HEAD_BYTES: Final = 4096
_BUFFER_BYTES: Final = 2**17


@dataclass(kw_only=True, slots=True)
class OpenVideo:
    """An open file. Close it, or use it as a context manager."""

    file: BinaryIO
    size_bytes: int
    container: InputContainer
    stream: VideoStream
    facts: StreamFacts

    def close(self) -> None:
        self.container.close()
        self.file.close()

    def __enter__(self) -> OpenVideo:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_video(
    source: VideoSource, *, num_threads: int = 1, max_pixels: int = DEFAULT_MAX_PIXELS
) -> OpenVideo:
    """Open the pictures of a video.

    Args:
        source: The encoded file as bytes or a buffer, or the path of a regular file.
        num_threads: Decoding threads; 1 decodes in the thread that asks.
        max_pixels: Videos whose header claims larger frames are refused before any is decoded.

    Raises:
        DecodeError: Reasons `empty`, `not_a_file`, `unreadable_file`, `not_a_video` (and `html`, `json`,
            ... when the content tells), `no_moov`, `truncated`, `no_video_stream`, `unsupported_codec`,
            `too_many_pixels`, `corrupt`.
        MissingExtraError: Without PyAV.
    """
    av = import_av()
    file, size = open_source(source)
    try:
        kind = _tell_container(file, size)
        check_structure(file, size, kind)
        file.seek(0)
        try:
            container = av.open(
                file, "r", format=kind.demuxer, metadata_errors="replace", buffer_size=_BUFFER_BYTES
            )
        except av.error.FFmpegError as error:
            raise DecodeError("corrupt", f"the head of the {kind.name} cannot be read: {error}") from error
        try:
            stream = _choose_stream(container)
            facts = _facts(stream, container, kind, file)
            _check_pixels(stream, max_pixels)
            stream.codec_context.thread_type = "NONE" if num_threads == 1 else "AUTO"
            stream.codec_context.thread_count = num_threads
        except DecodeError:
            container.close()
            raise
    except DecodeError:
        file.close()
        raise
    return OpenVideo(file=file, size_bytes=size, container=container, stream=stream, facts=facts)


def _tell_container(file: BinaryIO, size: int) -> Container:
    head = file.read(_HEAD_BYTES)
    kind = sniff_container(head)
    if kind is None:
        raise _no_video(head, size)
    if kind.is_sound:
        raise DecodeError("no_video_stream", f"a sound file ({kind.name}); a cover picture is no video")
    return kind


def _no_video(head: bytes, size: int) -> DecodeError:
    try:
        name = sniff_image_format(head)
    except DecodeError as error:
        reason = "not_a_video" if error.reason in {"not_an_image", "text"} else error.reason
        detail = error.detail.replace("no known image", "no known video")
        return DecodeError(reason, detail.replace("place of the picture", "place of the video"))
    return DecodeError("not_a_video", f"a {name} picture of {size} bytes, wanted a video")


def _choose_stream(container: InputContainer) -> VideoStream:
    """The default video stream, else the first. Cover pictures and thumbnail tracks are none."""
    from av.stream import Disposition

    aside = Disposition.attached_pic | Disposition.timed_thumbnails | Disposition.still_image
    streams = [stream for stream in container.streams.video if not stream.disposition & aside]
    if not streams:
        kinds = ("cover picture" if stream.type == "video" else stream.type for stream in container.streams)
        found = ", ".join(sorted(kinds)) or "none"
        raise DecodeError("no_video_stream", f"the file has no pictures; its streams are: {found}")
    return next((stream for stream in streams if stream.disposition & Disposition.default), streams[0])


def _facts(stream: VideoStream, container: InputContainer, kind: Container, file: BinaryIO) -> StreamFacts:
    codec = stream.codec_context
    if codec is None:
        name = declared_codec(file, kind)
        raise DecodeError(
            "unsupported_codec",
            f"this build of FFmpeg has no decoder for codec {name}; convert the file, for example to H.264",
        )
    if not stream.time_base:
        raise DecodeError("corrupt", "the video stream has no clock")
    return StreamFacts(
        codec=codec.codec.canonical_name,
        container=kind.name,
        stored_width=codec.width,
        stored_height=codec.height,
        pixel_format=codec.pix_fmt or "unknown",
        header_frames=stream.frames,
        header_fps=float(stream.average_rate or 0),
        time_base=Fraction(stream.time_base),
        has_audio=bool(container.streams.audio),
    )


def _check_pixels(stream: VideoStream, max_pixels: int) -> None:
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > max_pixels:
        raise DecodeError(
            "too_many_pixels",
            f"the header claims frames of {width}x{height} = {width * height} pixels, the budget is "
            f"{max_pixels}; raise max_pixels or shrink the video",
        )
