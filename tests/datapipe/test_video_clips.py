"""Clips by time, told by the number that each frame of the video shows."""

from __future__ import annotations

import pytest

from datapipe.decode.video import scan_video
from datapipe.errors import DataError
from datapipe.video_clips import ClipField, even_starts, read_clips
from tools.video_clips import make_clip, read_number

VIDEO = make_clip(30)  # one second


def test_several_clips_of_one_video() -> None:
    clip = ClipField(length_s=0.2, fps=30)
    clips = read_clips(VIDEO, [0.5, 0.0, 0.8], clip, num_frames=30)
    assert clips.shape == (3, 6, 48, 64, 3) and clips.flags.writeable
    numbers = [[read_number(frame) for frame in frames] for frames in clips]
    assert numbers == [list(range(start, start + 6)) for start in (15, 0, 24)]


def test_other_rates_leave_out_and_repeat() -> None:
    slow = read_clips(VIDEO, [0.0], ClipField(length_s=1.0, fps=10), info=scan_video(VIDEO))
    assert [read_number(frame) for frame in slow[0]] == list(range(1, 30, 3))
    fast = read_clips(VIDEO, [0.0], ClipField(length_s=0.1, fps=60))
    assert [read_number(frame) for frame in fast[0]] == [0, 0, 1, 1, 2, 2]


def test_beyond_the_end_the_last_frame_stands() -> None:
    clips = read_clips(VIDEO, [0.9], ClipField(length_s=0.2, fps=30))
    assert [read_number(frame) for frame in clips[0]] == [27, 28, 29, 29, 29, 29]


def test_sizes_and_starts() -> None:
    clip = ClipField(length_s=0.1, fps=30, size=(24, 32))
    assert read_clips(VIDEO, [0.0], clip).shape == (1, 3, 24, 32, 3)
    assert even_starts(1.1, clip, 3) == pytest.approx([0.0, 0.5, 1.0])
    assert even_starts(1.1, clip, 1) == pytest.approx([0.5])
    assert even_starts(0.05, clip, 2) == [0.0, 0.0]
    with pytest.raises(DataError, match=r"0.01 s at 10 frames a second has no frame"):
        ClipField(length_s=0.01, fps=10)
