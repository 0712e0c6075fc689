"""One full decode of a video at ingest: how many frames there are, when each is shown, what is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from datapipe.decode.image import DEFAULT_MAX_PIXELS
from datapipe.decode.video.boxes import claimed_samples
from datapipe.decode.video.damage import count_damaged, known_times, lost_packets, missing_at_end
from datapipe.decode.video.info import StreamFacts, VideoInfo
from datapipe.decode.video.opening import OpenVideo, open_video
from datapipe.decode.video.orientation import UPRIGHT, Orientation, parse_display_matrix
from datapipe.decode.video.packages import import_av
from datapipe.decode.video.packets import PacketLog
from datapipe.decode.video.source import VideoSource
from datapipe.decode.video.timeline import header_step, increasing_times, is_uneven
from datapipe.errors import DecodeError

if TYPE_CHECKING:
    from av import VideoFrame

__all__ = ["DEFAULT_MAX_DAMAGED", "decoded_frames", "orientation_of", "scan_video"]

DEFAULT_MAX_DAMAGED: Final = 0.02

# Codings that put exactly one picture into a packet; only there does a packet without a frame mean damage.
_ONE_PICTURE: Final = frozenset({"h264", "hevc", "vp9", "av1", "mjpeg"})
# Containers that store decoding times only: with reordered frames, a packet's time is not its frame's.
_WITHOUT_PRESENTATION_TIMES: Final = frozenset({"avi", "asf"})
# Containers whose clock starts anywhere: time 0 is the first frame there, else the clock's own zero.
_FREE_CLOCKS: Final = frozenset({"mpegts", "mpegps"})


def scan_video(
    source: VideoSource,
    *,
    max_damaged: float = DEFAULT_MAX_DAMAGED,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> VideoInfo:
    """Decode every frame once, in one thread, without keeping any.

    Decoders hide damage: they fill holes with neighbouring pictures and go on. What they mark is counted
    here, with all frames that depend on it up to the next key frame.

    Args:
        source: The encoded file as bytes or a buffer, or the path of a regular file.
        max_damaged: Share of damaged frames, 0..1, up to which a video is accepted.
        max_pixels: Budget of pixels a frame, read from the header.

    Raises:
        DecodeError: The reasons of open_video; `corrupt` when no frame decodes; `damaged` over the limit.
        MissingExtraError: Without PyAV.
    """
    with open_video(source, max_pixels=max_pixels) as video:
        log = PacketLog(video.facts.codec, video.stream.codec_context.extradata)
        tally = _Tally()
        for frame in decoded_frames(video, log, tally.lost):
            tally.add(frame)
        info = _summary(video, log, tally)
    if info.damaged > max_damaged * info.frames:
        raise DecodeError(
            "damaged",
            f"{info.damaged} of {info.frames} frames are damaged or depend on damaged ones, the limit is "
            f"{max_damaged:g} of them; fetch the file again or raise max_damaged",
        )
    return info


def decoded_frames(
    video: OpenVideo, log: PacketLog | None = None, lost: list[int | None] | None = None
) -> Iterator[VideoFrame]:
    """Decode from where the file stands to its end, past everything that cannot be decoded.

    Args:
        video: Open file.
        log: Is shown every packet before it is decoded.
        lost: Gets the times of packets that the decoder refused.
    """
    error_kind = import_av().error.FFmpegError
    decoder = video.stream.codec_context
    packets = iter(video.container.demux(video.stream))
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            break
        except error_kind as error:
            raise DecodeError("corrupt", f"the {video.facts.container} breaks off: {error}") from error
        if packet.size == 0:
            continue  # repeats the last picture, or is the end; the decoder would take it for the end
        if log is not None:
            log.add_packet(packet)
        try:
            yield from decoder.decode(packet)
        except error_kind as error:
            _refuse_unsupported(error, video)
            if lost is not None:
                lost.append(packet.pts)
    try:
        yield from decoder.decode(None)
    except error_kind:
        if lost is not None:
            lost.append(None)


def orientation_of(frame: VideoFrame) -> Orientation:
    """The turn that the container, or the coded stream, asks for."""
    side_data: Any = frame.side_data
    matrix = side_data.get("DISPLAYMATRIX")
    return UPRIGHT if matrix is None else parse_display_matrix(bytes(matrix))


def _refuse_unsupported(error: Exception, video: OpenVideo) -> None:
    av = import_av()
    if isinstance(error, av.error.DecoderNotFoundError | av.error.PatchWelcomeError):
        raise DecodeError(
            "unsupported_codec",
            f"this build of FFmpeg cannot decode this kind of {video.facts.codec}: {error}; convert the file",
        ) from error


@dataclass(kw_only=True, slots=True)
class _Tally:
    """What the frames say, one number a frame."""

    pts: list[int | None] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)  # positions of frames that the decoder marked
    lost: list[int | None] = field(default_factory=list)  # times of packets that it refused
    size: tuple[int, int] | None = None
    orientation: Orientation = UPRIGHT
    last_duration: int = 0
    has_size_changes: bool = False

    def add(self, frame: VideoFrame) -> None:
        if self.size is None:
            self.size = (frame.width, frame.height)
            self.orientation = orientation_of(frame)
        self.has_size_changes |= (frame.width, frame.height) != self.size
        if frame.is_corrupt:
            self.damaged.append(len(self.pts))
        self.pts.append(frame.pts)
        self.last_duration = frame.duration or 0


def _summary(video: OpenVideo, log: PacketLog, tally: _Tally) -> VideoInfo:
    facts = _with_claimed_count(video)
    if tally.size is None:
        raise DecodeError(
            "corrupt", f"none of {log.num_packets} packets of {facts.codec} could be decoded to a frame"
        )
    step = header_step(facts.header_fps, facts.time_base)
    pts, are_times_made_up = increasing_times(tally.pts, step)
    if facts.container in _FREE_CLOCKS:
        zero = int(pts[0])
        pts = pts - zero
    else:
        zero = 0
    entries = log.entry_pts - zero
    are_packets_frames = log.is_indexable and not are_times_made_up and facts.codec in _ONE_PICTURE
    lost = lost_packets(log, pts + zero) if are_packets_frames else known_times(tally.lost)
    damaged = count_damaged(pts, entries, tally.damaged, [time - zero for time in lost])
    ends_early = missing_at_end(video, pts, zero)
    damaged = min(damaged + ends_early, len(pts))
    is_reordered = facts.container in _WITHOUT_PRESENTATION_TIMES and video.stream.codec_context.has_b_frames
    is_plain = log.is_indexable and not are_times_made_up and not is_reordered and damaged == 0 and not lost
    width, height = tally.size[::-1] if tally.orientation.swaps_axes else tally.size
    span = int(pts[-1] - pts[0])
    mean_step = span / (len(pts) - 1) if len(pts) > 1 else float(tally.last_duration or step)
    end = span + (tally.last_duration or mean_step)
    return VideoInfo(
        facts=facts,
        width=width,
        height=height,
        rotation=tally.orientation.rotation,
        is_mirrored=tally.orientation.is_mirrored,
        pts=pts,
        duration_s=float(end * facts.time_base),
        fps=float(1 / (mean_step * facts.time_base)) if mean_step else 0.0,
        is_vfr=is_uneven(pts, mean_step),
        damaged=damaged,
        zero_pts=zero,
        num_packets=log.num_packets,
        num_discarded=log.num_discarded,
        num_open_entries=log.num_open_entries,
        num_leading=log.num_leading,
        can_seek=is_plain and len(pts) == log.num_packets,
        entry_pts=entries,
        notes=_notes(log, tally, len(pts), facts.header_frames, are_times_made_up, ends_early > 0),
    )


def _with_claimed_count(video: OpenVideo) -> StreamFacts:
    if video.facts.container not in ("mp4", "mov"):
        return video.facts
    claimed = claimed_samples(video.file, video.size_bytes)
    return replace(video.facts, header_frames=claimed or video.facts.header_frames)


def _notes(
    log: PacketLog,
    tally: _Tally,
    num_frames: int,
    header_frames: int,
    are_times_made_up: bool,
    ends_early: bool,
) -> tuple[str, ...]:
    conditions = (
        ("header_count_missing", header_frames == 0),
        ("header_count_wrong", log.num_discarded == 0 and header_frames not in (0, num_frames)),
        ("edit_list", log.num_discarded > 0),
        ("size_changes", tally.has_size_changes),
        ("times_repaired", are_times_made_up),
        ("ends_early", ends_early),
        ("packets_without_frame", log.num_packets > num_frames),
    )
    return tuple(name for name, holds in conditions if holds)
