"""Field cases of videos: what phones, cameras, browsers and broken downloads really leave."""

from __future__ import annotations

import io
import logging
import os
import time

import av
import numpy as np
import psutil
import pytest
from PIL import Image

from datapipe.decode.video import VideoReader, scan_video
from datapipe.errors import DecodeError
from tools.video_clips import (
    add_sample_to_header,
    make_clip,
    make_sound,
    numbered_picture,
    read_number,
    set_turn,
)

BACKENDS = ("auto", "pyav", "decord")


def bright_corner(frame: np.ndarray) -> tuple[bool, bool]:
    """Whether the corner patch stands at the bottom, and at the right."""
    height, width = frame.shape[:2]
    corners = {
        (bottom, right): float(frame[height * 3 // 4 * bottom :][:8, width * 3 // 4 * right :][:, :8].mean())
        for bottom in (False, True)
        for right in (False, True)
    }
    return max(corners, key=lambda corner: corners[corner])


@pytest.fixture(scope="module")
def upright() -> bytes:
    picture = np.full((48, 64, 3), 40, np.uint8)
    picture[:12, :16] = 250
    return make_clip(6, pictures=[picture] * 6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("degrees", "corner"), [(90, (False, True)), (180, (True, True)), (270, (True, False))]
)
def test_vid_01_display_matrix(upright: bytes, degrees: int, corner: tuple[bool, bool], backend: str) -> None:
    clip = set_turn(upright, degrees)
    with av.open(io.BytesIO(clip)) as container:
        stored = next(container.decode(video=0))
    assert (stored.width, stored.height) == (64, 48)  # the decoder alone leaves it lying

    info = scan_video(clip)
    size = (48, 64) if degrees in (90, 270) else (64, 48)
    assert (info.width, info.height, info.rotation) == (*size, degrees)
    with VideoReader(clip, backend=backend) as reader:
        frame = reader.frame(3)
        assert reader.rotation == degrees
    assert frame.shape == (info.height, info.width, 3)
    assert bright_corner(frame) == corner
    with VideoReader(upright) as reader:
        np.testing.assert_array_equal(frame, np.rot90(reader.frame(3), -degrees // 90))


def test_vid_03_header_frame_count() -> None:
    clip = make_clip(60)
    with_one_more = scan_video(add_sample_to_header(clip))
    without_count = scan_video(make_clip(60, container="matroska"))
    for info, claimed in ((with_one_more, 61), (without_count, 0)):
        assert info.frames == 60  # by decoding
        assert info.header_frames == claimed
        assert info.damaged == 0
        assert len(info.times) == 60
    for data in (add_sample_to_header(clip), make_clip(60, container="matroska")):
        for backend in BACKENDS:
            with VideoReader(data, backend=backend) as reader:
                assert len(reader) == 60
                assert read_number(reader.frame(-1)) == 59
                assert read_number(reader.frame_at(1e6)) == 59  # clamped to what decodes
                assert read_number(reader.frame_at(-1.0)) == 0
                with pytest.raises(IndexError, match="frame 60 of a video of 60 frames"):
                    reader.frame(60)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [250, 1])
def test_vid_05_seek_equals_sequential(group: int, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    clip = make_clip(300, group=group, b_frames=3)
    with VideoReader(clip, backend=backend) as reader:
        sequential = list(reader)
    assert [read_number(frame) for frame in sequential] == list(range(300))
    picked = np.random.default_rng(0).permutation(300)[:40].tolist()
    caplog.set_level(logging.DEBUG, logger="datapipe.decode.video.reader")
    with VideoReader(clip, backend=backend) as reader:
        for index in picked:
            caplog.clear()
            np.testing.assert_array_equal(reader.frame(index), sequential[index])
            decoded = caplog.records[-1].args[0]  # the cost is logged, and bounded by the group
            assert 1 <= decoded <= group + 16
        np.testing.assert_array_equal(reader.frames(picked), np.stack([sequential[i] for i in picked]))


def test_vid_06_broken_downloads() -> None:
    clip = make_clip(60)
    with pytest.raises(DecodeError) as empty:
        scan_video(b"")
    assert empty.value.reason == "empty"
    with pytest.raises(DecodeError, match="moov") as half:
        scan_video(clip[: len(clip) // 2])
    assert half.value.reason == "no_moov"
    with pytest.raises(DecodeError) as no_stream:
        scan_video(make_sound())
    assert no_stream.value.reason == "no_video_stream"
    for data in (b"", clip[: len(clip) // 2], make_sound()):
        with pytest.raises(DecodeError):
            VideoReader(data)


def test_vid_08_codec_or_no_stream() -> None:
    cover = io.BytesIO()
    Image.fromarray(numbered_picture(1)).save(cover, "JPEG")
    sounds = (
        make_sound(),
        make_sound(container="mp3", codec="libmp3lame", cover=cover.getvalue()),
        make_sound(container="mp4", cover=cover.getvalue()),
    )
    for sound in sounds:
        with pytest.raises(DecodeError) as error:
            scan_video(sound)
        assert error.value.reason == "no_video_stream"
    unknown = make_clip(3).replace(b"avc1", b"zzzz")
    with pytest.raises(DecodeError, match="'zzzz'") as error:
        scan_video(unknown)
    assert error.value.reason == "unsupported_codec"
    clip = make_clip(10, codec="libsvtav1", options={"preset": "12"}, width=64, height=64)
    info = scan_video(clip)
    assert (info.codec, info.frames, info.damaged) == ("av1", 10, 0)
    for backend in BACKENDS:  # a decoder that lacks the codec leaves the file to the other one
        with VideoReader(clip, backend=backend) as reader:
            assert reader.frames(range(10)).shape == (10, 64, 64, 3)


def flat_4k(num_frames: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 3840, 2160, "yuv420p"
        stream.options = {"preset": "ultrafast"}
        stream.codec_context.thread_count = 1
        frame = av.VideoFrame(3840, 2160, "yuv420p")
        for plane in frame.planes:
            plane.update(bytes([90]) * plane.buffer_size)
        for position in range(num_frames):
            frame.pts = position
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


def memory_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def check_no_read_ahead(clip: bytes, num_frames: int, pause_s: float, backend: str) -> None:
    before = memory_mib()
    with VideoReader(clip, backend=backend) as reader:
        assert len(reader) == num_frames
        assert reader.frame(0).shape == (2160, 3840, 3)
        after_first = memory_mib()
        threads = num_threads()
        time.sleep(pause_s)
        assert memory_mib() - after_first < 16  # nothing is decoded ahead while the program sleeps
        assert num_threads() <= threads
        assert memory_mib() - before < 300


def check_flat(num_opens: int, backend: str) -> None:
    clip = make_clip(30)

    def open_and_read(times: int) -> None:
        for _ in range(times):
            with VideoReader(clip, backend=backend) as reader:
                reader.frame(29)

    open_and_read(100)
    memory, threads = memory_mib(), num_threads()
    open_and_read(num_opens)
    assert memory_mib() - memory < 8
    assert num_threads() <= threads + 1


def test_vid_09_memory_and_threads() -> None:
    check_no_read_ahead(flat_4k(24), 24, 0.5, "auto")
    check_flat(200, "auto")


@pytest.fixture(scope="module")
def long_flat_4k() -> bytes:
    return flat_4k(600)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "decord"])
def test_vid_09_memory_and_threads_in_full(backend: str, long_flat_4k: bytes) -> None:
    check_no_read_ahead(long_flat_4k, 600, 5.0, backend)
    check_flat(2000, backend)
