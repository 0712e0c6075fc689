"""The scan at ingest: counts, times, turns and damage of clips made here."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from datapipe.decode.video import MissingExtraError, VideoReader, packages, scan_video, video_thumbnail
from datapipe.errors import DecodeError
from tools.video_clips import box, make_clip, make_sound, read_number, set_edit_list, set_turn

MS = Fraction(1, 1000)


def flip_bits(data: bytes, start: int, stop: int, count: int) -> bytes:
    changed, generator = bytearray(data), np.random.default_rng(count)
    for _ in range(count):
        changed[int(generator.integers(start, stop))] ^= 1 << int(generator.integers(8))
    return bytes(changed)


@pytest.mark.parametrize(
    ("codec", "container", "b_frames", "found"),
    [
        ("libx264", "mp4", 3, ("h264", "mp4")),
        ("libx264", "mov", 0, ("h264", "mov")),
        ("libx264", "matroska", 3, ("h264", "mkv")),
        ("libx264", "mpegts", 3, ("h264", "mpegts")),
        ("libx264", "avi", 3, ("h264", "avi")),
        ("libx265", "mp4", 3, ("hevc", "mp4")),
        ("libvpx", "webm", 0, ("vp8", "webm")),
        ("libvpx-vp9", "webm", 0, ("vp9", "webm")),
        ("mpeg4", "avi", 2, ("mpeg4", "avi")),
        ("mpeg2video", "mpeg", 2, ("mpeg2video", "mpegps")),
        ("flv", "flv", 0, ("flv1", "flv")),
    ],
)
def test_every_container_tells_count_times_and_size(
    codec: str, container: str, b_frames: int, found: tuple[str, str]
) -> None:
    options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    clip = make_clip(24, codec=codec, container=container, b_frames=b_frames, options=options, group=12)
    info = scan_video(clip)
    assert (info.codec, info.container) == found
    assert (info.frames, info.width, info.height, info.rotation) == (24, 64, 48, 0)
    assert info.fps == pytest.approx(30, rel=0.01)
    assert info.duration_s == pytest.approx(0.8, abs=0.01)
    assert not info.is_vfr
    assert not info.has_audio
    assert info.damaged == 0
    np.testing.assert_allclose(info.times - info.times[0], np.arange(24) / 30, atol=0.001)


def test_input_may_be_bytes_a_buffer_or_a_path(tmp_path: Path) -> None:
    clip = make_clip(5)
    path = tmp_path / "clip.of.odd name.bin"
    path.write_bytes(clip)
    for source in (clip, bytearray(clip), memoryview(clip), path, str(path)):
        assert scan_video(source).frames == 5


def test_variable_rate() -> None:
    times = np.cumsum(np.random.default_rng(0).integers(5, 90, 20)).tolist()
    info = scan_video(make_clip(20, times=times, time_base=MS))
    assert info.is_vfr
    np.testing.assert_allclose(info.times, np.array(times) / 1000, atol=1e-9)
    assert info.fps == pytest.approx(19 / (times[-1] - times[0]) * 1000)


def test_rounded_times_are_no_variable_rate() -> None:
    assert not scan_video(make_clip(30, container="matroska")).is_vfr  # 0, 33, 67, 100 ms


def test_a_dropped_frame_is_variable_rate() -> None:
    assert scan_video(make_clip(20, times=[*range(10), *range(11, 21)])).is_vfr


def test_one_frame() -> None:
    info = scan_video(make_clip(1))
    assert (info.frames, info.is_vfr) == (1, False)
    assert info.duration_s == pytest.approx(1 / 30)
    assert info.presentation_time(0) == 0


def test_sound_is_noticed() -> None:
    assert scan_video(make_clip(5, has_sound=True)).has_audio


@pytest.mark.parametrize(
    ("edits", "numbers", "first_s"),
    [
        ([(333, 1024 + 5 * 512)], range(5, 15), 0.0),  # the middle third
        ([(500, -1), (1000, 1024)], range(30), 0.5),  # nothing is shown at first
        ([(333, 1024 + 20 * 512), (333, 1024)], [*range(20, 30), *range(10)], 0.0),  # end before start
        ([(333, 1024), (333, 1024)], [*range(10), *range(10)], 0.0),  # shown twice
    ],
)
@pytest.mark.parametrize("backend", ["auto", "decord"])
def test_an_edit_list_is_settled_by_presentation_time(
    edits: list[tuple[int, int]], numbers: list[int], first_s: float, backend: str
) -> None:
    """1024 is the media time of the first frame that the encoder wrote, 512 the step."""
    clip = set_edit_list(make_clip(30, group=10), edits)
    info = scan_video(clip)
    assert info.frames == len(list(numbers))
    assert info.damaged == 0
    expected = first_s + np.arange(info.frames) / 30
    np.testing.assert_allclose(info.times, expected, atol=0.001 if len(edits) == 1 or first_s else 0.04)
    with VideoReader(clip, backend=backend) as reader:
        assert [read_number(frame) for frame in reader] == list(numbers)
        assert [read_number(reader.frame(i)) for i in (7, 2, 9, 0)] == [numbers[i] for i in (7, 2, 9, 0)]
        assert read_number(reader.frame_at(first_s + 4.5 / 30)) == numbers[4]


def test_damage_is_counted_up_to_the_next_key_frame_and_refused() -> None:
    clip = make_clip(60, group=10)
    start, stop = box(clip, "mdat")
    broken = flip_bits(clip, start + 8, stop, 6)
    info = scan_video(broken, max_damaged=1.0)
    assert 0 < info.damaged < 60
    assert info.damaged_fraction == info.damaged / info.frames
    with pytest.raises(DecodeError, match=f"{info.damaged} of {info.frames} frames") as error:
        scan_video(broken)
    assert error.value.reason == "damaged"
    assert scan_video(broken, max_damaged=info.damaged_fraction).damaged == info.damaged


def test_lost_clusters_at_the_end_of_a_matroska_file_are_damage() -> None:
    clip = make_clip(60, codec="mpeg4", b_frames=0, group=5, container="matroska")
    middle = len(clip) // 2
    info = scan_video(clip[:middle] + bytes(len(clip) - middle), max_damaged=1.0)
    assert info.frames < 60
    assert info.damaged == info.frames  # more are missing than are there
    assert "ends_early" in info.notes


def test_nothing_but_damage_is_corrupt() -> None:
    clip = make_clip(10)
    start, stop = box(clip, "mdat")
    with pytest.raises(DecodeError) as error:
        scan_video(clip[: start + 8] + b"\xff" * (stop - start - 8) + clip[stop:], max_damaged=1.0)
    assert error.value.reason == "corrupt"


def test_the_budget_of_pixels_is_read_from_the_header() -> None:
    with pytest.raises(DecodeError, match="64x48 = 3072 pixels") as error:
        scan_video(make_clip(2), max_pixels=3000)
    assert error.value.reason == "too_many_pixels"


def test_a_stream_cut_out_of_a_broadcast_keeps_its_whole_groups() -> None:
    clip = make_clip(60, container="mpegts", group=10)
    info = scan_video(clip[188 * 20 :])
    assert 0 < info.frames < 60
    assert info.times[0] == 0
    with VideoReader(clip[188 * 20 :]) as reader:
        numbers = [read_number(frame) for frame in reader]
    assert numbers == list(range(60 - info.frames, 60))


def test_a_thumbnail_is_one_upright_frame() -> None:
    clip = set_turn(make_clip(11), 90)
    assert video_thumbnail(clip).shape == (64, 48, 3)
    small = video_thumbnail(clip, max_side=32, at=1.0)
    assert small.shape == (32, 24, 3)
    assert small.dtype == np.uint8


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'unirl\[video\]'"):
        scan_video(b"anything")
    monkeypatch.setitem(sys.modules, "decord", None)
    with pytest.raises(ImportError, match="decord2"):
        packages.import_decord()


def test_importing_the_package_imports_no_decoder() -> None:
    code = "import sys, datapipe, datapipe.decode.video; print({'av', 'decord'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_sound_alone_has_no_pictures() -> None:
    with pytest.raises(DecodeError, match="audio") as error:
        scan_video(make_sound())
    assert error.value.reason == "no_video_stream"
