"""Frames by index and by time: the same as a plain sequential decode, whichever way they are asked for."""

from __future__ import annotations

import io
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe.decode.video import VideoReader, scan_video
from datapipe.decode.video.decord_frames import decord_fault
from datapipe.decode.video.frame_index import FrameIndex, _log_from_packets, _log_from_tables
from datapipe.decode.video.opening import open_video
from datapipe.decode.video.orientation import UPRIGHT
from datapipe.errors import DataError, DecodeError
from tools.video_clips import box, make_clip, numbered_picture, read_number, set_edit_list

MS = Fraction(1, 1000)
OPEN_GROUPS = {"x264-params": "open-gop=1:keyint=10:min-keyint=10"}
ROLLING = {"x264-params": "intra-refresh=1:keyint=10"}
X265 = {"x265-params": "keyint=10:log-level=none"}

# Name -> arguments of make_clip, and the backend that serves a wish for decord.
CLIPS: Mapping[str, tuple[dict[str, object], str]] = {
    "h264 one group": ({}, "decord"),
    "h264 key frames only": ({"group": 1}, "decord"),
    "h264 short groups": ({"group": 7}, "decord"),
    "h264 open groups": ({"options": OPEN_GROUPS}, "pyav"),
    "h264 rolling refresh": ({"options": ROLLING}, "pyav"),
    "h264 mkv": ({"container": "matroska"}, "decord"),
    "h264 ts": ({"container": "mpegts", "group": 10}, "pyav"),
    "h264 ts open groups": ({"container": "mpegts", "options": OPEN_GROUPS}, "pyav"),
    "h264 ts rolling refresh": ({"container": "mpegts", "options": ROLLING}, "pyav"),
    "h264 avi": ({"container": "avi"}, "pyav"),
    "h264 avi in order": ({"container": "avi", "b_frames": 0, "group": 10}, "pyav"),
    "h264 variable rate": ({"times": [i * i + 7 for i in range(28)], "time_base": MS}, "decord"),
    "h264 negative start": ({"times": list(range(-5, 23))}, "pyav"),
    "h264 odd size": ({"width": 63, "height": 47, "pixel_format": "yuv444p"}, "decord"),
    "h264 fragments": (
        {"container_options": {"movflags": "frag_keyframe+empty_moov"}, "group": 10},
        "decord",
    ),
    "h264 sound": ({"has_sound": True}, "decord"),
    "h264 full range": ({"pixel_format": "yuvj420p"}, "decord"),
    "h264 bt709": ({"options": {"x264-params": "colormatrix=bt709"}}, "decord"),
    "hevc": ({"codec": "libx265", "options": X265}, "pyav"),
    "hevc 10 bit": ({"codec": "libx265", "options": X265, "pixel_format": "yuv420p10le"}, "pyav"),
    "av1": (
        {"codec": "libsvtav1", "width": 64, "height": 64, "options": {"preset": "12"}, "num_frames": 20},
        "decord",
    ),
    "vp9 webm": ({"codec": "libvpx-vp9", "container": "webm", "group": 10}, "decord"),
    "vp8 webm": ({"codec": "libvpx", "container": "webm"}, "pyav"),
    "mpeg4 mp4": ({"codec": "mpeg4", "group": 12}, "pyav"),
    "mpeg4 mp4 in order": ({"codec": "mpeg4", "group": 12, "b_frames": 0}, "decord"),
    "mpeg4 avi": ({"codec": "mpeg4", "container": "avi", "group": 12}, "pyav"),
    "mpeg2 ps": ({"codec": "mpeg2video", "container": "mpeg", "b_frames": 2, "group": 12}, "pyav"),
    "mjpeg mov": (
        {"codec": "mjpeg", "container": "mov", "b_frames": 0, "pixel_format": "yuvj420p"},
        "decord",
    ),
}


def clip_of(name: str) -> bytes:
    return make_clip(**({"num_frames": 28} | CLIPS[name][0]))  # type: ignore[arg-type]


def plain_decode(clip: bytes) -> list[np.ndarray]:
    """Every frame in order, by the simplest program."""
    with av.open(io.BytesIO(clip)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("name", CLIPS)
def test_every_way_gives_the_frames_of_a_plain_decode(name: str) -> None:
    clip = clip_of(name)
    expected = plain_decode(clip)
    count = len(expected)
    info = scan_video(clip)
    assert info.frames == count
    order = np.random.default_rng(0).permutation(count).tolist()
    clip_start = count // 3
    for options, backend in (
        ({}, "pyav"),
        ({"info": info}, "pyav"),
        ({"num_threads": 2}, "pyav"),
        ({"backend": "decord"}, CLIPS[name][1]),
        ({"backend": "decord", "info": info}, CLIPS[name][1]),
    ):
        with VideoReader(memoryview(clip), **options) as reader:  # type: ignore[arg-type]
            assert reader.backend == backend
            assert len(reader) == count
            np.testing.assert_allclose(reader.times, info.times, atol=1e-9)
            for index in order if not options else order[:10]:
                np.testing.assert_array_equal(reader.frame(index), expected[index])
            for frame, other in zip(reader, expected, strict=True):
                np.testing.assert_array_equal(frame, other)
            window = range(clip_start, min(clip_start + 16, count))
            np.testing.assert_array_equal(reader.frames(window), np.stack([expected[i] for i in window]))


TABLE_CLIPS: Mapping[str, tuple[dict[str, object], bool]] = {  # and whether the tables are enough
    "reordered": ({"group": 7}, True),
    "in order": ({"b_frames": 0}, True),
    "quicktime": ({"container": "mov"}, True),
    "negative offsets": ({"container_options": {"movflags": "negative_cts_offsets"}}, True),
    "edit list": ({"times": list(range(-5, 23))}, True),
    "with sound": ({"has_sound": True}, True),
    "hevc": ({"codec": "libx265", "options": X265}, True),
    "one frame": ({"num_frames": 1}, True),
    "fragments": ({"container_options": {"movflags": "frag_keyframe+empty_moov"}, "group": 5}, False),
    "matroska": ({"container": "matroska"}, False),
}


@pytest.mark.parametrize("name", TABLE_CLIPS)
def test_the_tables_of_an_mp4_say_what_its_packets_say(name: str) -> None:
    options, are_enough = TABLE_CLIPS[name]
    clip = make_clip(**({"num_frames": 28} | options))  # type: ignore[arg-type]
    with open_video(clip) as video:
        from_tables = _log_from_tables(video)
    with open_video(clip) as video:
        from_packets = _log_from_packets(video)
    assert from_packets is not None
    assert (from_tables is not None) == are_enough
    if from_tables is not None:
        said, expected = vars(from_tables), vars(from_packets)
        assert said.pop("num_open_entries") <= expected.pop("num_open_entries")
        assert said == expected


def test_an_edit_list_in_pieces_is_read_from_its_packets() -> None:
    with open_video(set_edit_list(make_clip(30, group=10), [(333, 1024), (333, 1024)])) as video:
        assert _log_from_tables(video) is None


def test_each_reason_to_leave_decord_is_given() -> None:
    reasons = {
        "h264 one group": None,
        "h264 ts": "container mpegts",
        "vp8 webm": "codec vp8",
        "hevc 10 bit": "yuv420p10le",
        "h264 open groups": "reach across",
        "h264 negative start": "edit list",
    }
    for name, reason in reasons.items():
        info = scan_video(clip_of(name))
        fault = decord_fault(info.facts, FrameIndex.from_info(info), UPRIGHT)
        assert (fault is None) if reason is None else (fault is not None and reason in fault)


SEQUENCE_CLIP = make_clip(40, group=9)
SEQUENCE_FRAMES = plain_decode(SEQUENCE_CLIP)


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(-40, 39), min_size=1, max_size=6), min_size=1, max_size=6))
def test_any_sequence_of_requests_is_exact(requests: list[list[int]]) -> None:
    with VideoReader(SEQUENCE_CLIP) as reader:
        for indices in requests:
            wanted = np.stack([SEQUENCE_FRAMES[index] for index in indices])
            np.testing.assert_array_equal(reader.frames(indices), wanted)


def test_a_sequential_read_decodes_each_frame_once() -> None:
    with VideoReader(make_clip(40, group=9)) as reader:
        assert len(list(reader)) == 40
        assert reader.num_decoded == 40


def test_frames_by_time() -> None:
    times = [0, 40, 50, 200, 1000, 1010]
    clip = make_clip(6, times=times, time_base=MS)
    with VideoReader(clip) as reader:
        np.testing.assert_allclose(reader.times, np.array(times) / 1000)
        assert reader.presentation_time(3) == Fraction(1, 5)
        shown = {-5.0: 0, 0.0: 0, 0.039: 0, 0.04: 1, 0.049: 1, 0.1: 2, 0.199: 2, 0.2: 3, 0.999: 3, 9.0: 5}
        assert {time: reader.index_at(time) for time in shown} == shown
        numbers = [read_number(frame) for frame in reader.frames_at([0.5, 0.0, 0.5, Fraction(1)])]
        assert numbers == [3, 0, 3, 4]


def test_rounded_container_times_do_not_shift_frames() -> None:
    """Matroska writes 33, 67, 100 ms; a person asks for 1/30, 2/30, 3/30 s."""
    with VideoReader(make_clip(30, container="matroska")) as reader:
        assert [reader.index_at(i / 30) for i in range(30)] == list(range(30))
    with VideoReader(make_clip(30, codec="mpeg4", container="avi", b_frames=0)) as reader:
        assert [reader.index_at((i + 0.4) / 30) for i in range(30)] == list(range(30))


def test_result_is_writable_contiguous_and_may_repeat() -> None:
    with VideoReader(make_clip(5)) as reader:
        frames = reader.frames([3, 3, -1])
        assert frames.shape == (3, 48, 64, 3)
        assert frames.dtype == np.uint8
        assert frames.flags.writeable
        assert frames.flags.c_contiguous
        np.testing.assert_array_equal(frames[0], frames[1])
        assert reader.frames([]).shape == (0, 0, 0, 3)
        assert reader.fps == pytest.approx(30)


def test_wrong_arguments() -> None:
    clip = make_clip(3)
    with pytest.raises(DataError, match="backend is 'opencv', wanted one of auto, pyav, decord"):
        VideoReader(clip, backend="opencv")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="num_threads is 0"):
        VideoReader(clip, num_threads=0)
    with VideoReader(clip) as reader, pytest.raises(IndexError, match="frame -4 of a video of 3 frames"):
        reader.frame(-4)


def broken_clip() -> bytes:
    clip = bytearray(make_clip(60, group=10))
    start, stop = box(bytes(clip), "mdat")
    generator = np.random.default_rng(3)
    for at in generator.integers(start + 8, stop, 6).tolist():
        clip[at] ^= 0x40
    return bytes(clip)


def test_damaged_files_are_read_from_the_start_so_that_indices_hold() -> None:
    clip = broken_clip()
    info = scan_video(clip, max_damaged=1.0)
    assert info.damaged
    assert not info.can_seek
    expected = plain_decode_past_damage(clip)
    assert info.frames == len(expected)
    with VideoReader(clip, info=info) as reader:
        for index in (50, 3, 31, 59 - (60 - info.frames)):
            np.testing.assert_array_equal(reader.frame(index), expected[index])


def plain_decode_past_damage(clip: bytes) -> list[np.ndarray]:
    found = []
    with av.open(io.BytesIO(clip)) as container:
        container.streams.video[0].thread_type = "NONE"  # threads hide damage in other ways
        for packet in container.demux(video=0):
            try:
                found += [frame.to_ndarray(format="rgb24") for frame in packet.decode()]
            except av.error.InvalidDataError:
                continue
    return found


def test_the_count_of_the_index_reveals_damage_elsewhere() -> None:
    clip = make_clip(60, group=10, codec="libsvtav1", width=64, height=64, options={"preset": "12"})
    start, stop = box(clip, "mdat")
    clip = clip[: start + (stop - start) // 2] + bytes(60) + clip[start + (stop - start) // 2 + 60 :]
    info = scan_video(clip, max_damaged=1.0)
    assert info.frames < 60
    with VideoReader(clip, num_frames=info.frames) as reader:
        assert len(reader) == info.frames
        assert read_number(reader.frame(-1)) == 59


def test_a_reader_of_another_file_than_the_info_is_refused() -> None:
    info = scan_video(make_clip(60))
    with VideoReader(make_clip(10), info=info) as reader, pytest.raises(DecodeError, match="scan") as error:
        reader.frame(40)
    assert error.value.reason == "corrupt"


def test_frames_of_a_changing_size_are_scaled_to_the_first(tmp_path: Path) -> None:
    """Two Annex B streams one after the other, as a camera that was turned leaves them."""
    small, large = make_clip(5, container="mpegts"), make_clip(5, container="mpegts", width=128, height=96)
    clip = small + large
    info = scan_video(clip, max_damaged=1.0)
    assert "size_changes" in info.notes
    with VideoReader(clip, info=info) as reader:
        assert reader.frames(range(len(reader))).shape == (info.frames, 48, 64, 3)


def test_the_decoder_runs_in_the_thread_that_asks(tmp_path: Path) -> None:
    tasks = Path("/proc/self/task")
    path = tmp_path / "clip.mp4"
    path.write_bytes(make_clip(20))
    before = len(list(tasks.iterdir()))
    with VideoReader(path) as reader:
        reader.frames([3, 17])
        assert len(list(tasks.iterdir())) <= before


def test_close_may_be_called_twice() -> None:
    reader = VideoReader(make_clip(2))
    reader.close()
    reader.close()


def test_a_trimmed_clip_stays_exact_after_seeks() -> None:
    clip = set_edit_list(make_clip(30, group=10), [(333, 1024 + 15 * 512)])
    with VideoReader(clip) as reader:
        assert [read_number(reader.frame(i)) for i in (9, 0, 5)] == [24, 15, 20]


def test_pictures_survive_the_way_within_coding_loss() -> None:
    with VideoReader(make_clip(3, options={"crf": "1"}, pixel_format="yuv444p")) as reader:
        for number, frame in enumerate(reader):
            error = np.abs(frame.astype(int) - numbered_picture(number)).mean()
            assert error < 3


def test_the_head_is_checked_before_anything_is_decoded() -> None:
    with pytest.raises(DecodeError, match="the budget is 100"):
        open_video(make_clip(1), max_pixels=100)


@pytest.mark.parametrize(
    ("codec", "container", "pixel_format"),
    [("png", "mov", "rgba"), ("ffv1", "matroska", "bgra"), ("prores_ks", "mov", "yuva444p10le")],
)
def test_transparency_is_composited_on_white(codec: str, container: str, pixel_format: str) -> None:
    picture = np.full((48, 64, 4), (10, 200, 30, 255), np.uint8)
    picture[24:, :32, 3], picture[24:, 32:, 3] = 0, 128
    clip = make_clip(
        2, codec=codec, container=container, pixel_format=pixel_format, b_frames=0, pictures=[picture] * 2
    )
    for backend in ("auto", "decord"):
        with VideoReader(clip, backend=backend) as reader:
            frame = reader.frame(1)
        for place, wanted in (
            ((5, 5), (10, 200, 30)),
            ((40, 5), (255, 255, 255)),
            ((40, 60), (132, 227, 142)),
        ):
            np.testing.assert_allclose(frame[place], wanted, atol=6, err_msg=f"{backend} {place}")
