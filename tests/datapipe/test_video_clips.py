"""Clips by time, told by the number that each frame of the video shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datapipe import Loader, SampleError
from datapipe.decode.video import scan_video
from datapipe.errors import DataError
from datapipe.fields import RawSample
from datapipe.video_clips import (
    ClipField,
    VideoField,
    clips_of_frames,
    even_starts,
    random_starts,
    read_clips,
)
from storage import FeatureStore, View
from tools.video_clips import make_clip, numbered_picture, read_number

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


def raw(**changes: Any) -> RawSample:
    columns = {"duration_s": 1.0, "n_frames": 30}
    given = {"key": "a", "row": 0, "blob": VIDEO, "columns": columns, "tensors": {}, "seed": 1}
    return RawSample(**{**given, **changes})


def numbers(clips: np.ndarray) -> list[list[int]]:
    return [[read_number(frame) for frame in frames] for frames in clips]


def stored(fps: int) -> np.ndarray:
    """Frames of a second, numbered by the place in the video of 30 frames a second."""
    return np.stack([numbered_picture((2 * index + 1) * 15 // fps) for index in range(fps)])


def test_random_starts_follow_the_seed_and_stay_inside() -> None:
    clip = ClipField(length_s=0.4, fps=10)
    first = random_starts(2.0, clip, 50, seed=3)
    assert first == random_starts(2.0, clip, 50, seed=3) != random_starts(2.0, clip, 50, seed=4)
    assert first == sorted(first) and 0 <= first[0] < 0.3 and 1.3 < first[-1] <= 1.6
    assert random_starts(0.2, clip, 2, seed=3) == [0.0, 0.0]


@pytest.mark.parametrize("is_channels_first", [False, True])
@pytest.mark.parametrize("fps", [10, 30])
def test_stored_frames_are_those_that_decoding_gives(fps: int, is_channels_first: bool) -> None:
    clip = ClipField(length_s=0.4, fps=10)
    frames = stored(fps).transpose(0, 3, 1, 2) if is_channels_first else stored(fps)
    found = clips_of_frames(frames, [0.0, 0.3, 0.9], clip, frames_fps=fps)
    assert found.shape == (3, 4, 48, 64, 3)
    assert numbers(found)[:2] == numbers(read_clips(VIDEO, [0.0, 0.3], clip))
    assert len(set(numbers(found)[2][1:])) == 1
    small = clips_of_frames(frames, [0.0], ClipField(length_s=0.4, fps=10, size=(24, 32)), frames_fps=fps)
    assert small.shape == (1, 4, 24, 32, 3)


def test_a_field_reads_clips_of_a_row() -> None:
    clip = ClipField(length_s=0.2, fps=30)
    even = VideoField(clip=clip, num_clips=3)
    assert [each[0] for each in numbers(even.read(raw()))] == [0, 12, 24]
    listed = VideoField(clip=clip, num_clips=2, starts=(0.5, 0.1))
    assert [
        each[0] for each in numbers(listed.read(raw(columns={"duration_s": None, "n_frames": None})))
    ] == [
        15,
        3,
    ]
    drawn = VideoField(clip=clip, num_clips=2, starts="random")
    np.testing.assert_array_equal(drawn.read(raw()), drawn.read(raw()))
    assert numbers(drawn.read(raw(seed=5))) != numbers(drawn.read(raw()))


def test_a_field_takes_stored_frames_where_they_are() -> None:
    clip = ClipField(length_s=0.3, fps=10)
    field = VideoField(clip=clip, frames="frames", frames_fps=10, starts=(0.2,))
    assert field.tensors == ("frames",) and VideoField(clip=clip).tensors == ()
    without_file = raw(blob=None, tensors={"frames": stored(10)})
    assert numbers(field.read(without_file)) == numbers(field.read(raw(tensors={"frames": None})))
    with pytest.raises(DataError, match="no video, and no stored frames"):
        field.read(raw(blob=None, tensors={"frames": None}))
    with pytest.raises(DataError, match=r"float32 \(10, 48, 64, 3\), wanted uint8"):
        field.read(raw(tensors={"frames": stored(10).astype(np.float32)}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_s": float("nan")}, "a clip of nan s at 8 frames a second"),
        ({"length_s": float("inf")}, "a clip of inf s at 8 frames a second"),
        ({"length_s": "1"}, "a clip of '1' s at 8 frames a second"),
        ({"fps": 0.1}, "a clip of 1 s at 0.1 frames a second has no frame"),
        ({"size": 4}, r"size is 4, wanted \(height, width\)"),
        ({"size": (0, 4)}, r"size is \(0, 4\): one of its numbers is 0"),
    ],
)
def test_clips_of_no_frames_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ClipField(**{"length_s": 1, "fps": 8, **options})


def test_fields_that_make_no_sense_are_refused() -> None:
    clip = ClipField(length_s=0.2, fps=30)
    with pytest.raises(DataError, match="as many starts as clips"):
        VideoField(clip=clip, num_clips=2, starts=(0.5,))
    with pytest.raises(DataError, match="'even', 'random' or a tuple"):
        VideoField(clip=clip, starts="middle")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="give both"):
        VideoField(clip=clip, frames="frames")
    with pytest.raises(DataError, match=r"num_clips is 1\.5, wanted a whole number"):
        VideoField(clip=clip, num_clips=1.5)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"starts are \(nan,\), wanted seconds, finite numbers"):
        VideoField(clip=clip, starts=(float("nan"),))
    with pytest.raises(DataError, match="frames_fps nan; give both, the rate above 0"):
        VideoField(clip=clip, frames="frames", frames_fps=float("nan"))
    with pytest.raises(DataError, match="the row has no duration_s"):
        VideoField(clip=clip).read(raw(columns={"duration_s": None, "n_frames": 30}))


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> View:
    """Six videos of a second; the last three have ten frames stored."""
    store = FeatureStore.create(tmp_path_factory.mktemp("videos") / "store")
    facts = {"duration_s": 1.0, "n_frames": 30}
    frames = {"frames": stored(10)}
    store.append([{"key": f"{index}", "blob": VIDEO, **facts} for index in range(3)])
    store.append([{"key": f"{index}", "blob": VIDEO, "tensors": frames, **facts} for index in range(3, 6)])
    return store.refresh().select()


def clips_of(view: View, **options: Any) -> dict[str, list[list[int]]]:
    clip = ClipField(length_s=0.3, fps=10)
    field = VideoField(clip=clip, num_clips=2, starts="random", frames="frames", frames_fps=10)
    loader = Loader(view, batch_size=3, image=None, columns=(), fields={"clips": field}, seed=3, **options)
    found = {}
    for batch in loader:
        clips = batch.tensors["clips"]
        assert (clips.dtype, tuple(clips.shape[1:])) == (torch.uint8, (2, 3, 48, 64, 3))
        found.update({key: numbers(each.numpy()) for key, each in zip(batch.keys, clips)})
    return found


def test_a_loader_gives_batches_of_clips(videos: View) -> None:
    """The same ones on any number of threads and ranks; decoded or stored, by the row."""
    whole = clips_of(videos)
    assert sorted(whole) == sorted(videos.keys())
    assert clips_of(videos, num_threads=3) == whole
    ranks = [clips_of(videos, rank=rank, world_size=3) for rank in range(3)]
    assert {key: clips for rank in ranks for key, clips in rank.items()} == whole
    assert len({str(clips) for clips in whole.values()}) > 3
    assert {number % 3 for key in "012" for clip in whole[key] for number in clip} - {1}


def test_a_row_with_stored_frames_needs_no_file(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    store.append([{"key": f"{index}", "tensors": {"frames": stored(10)}} for index in range(4)])
    store.append([{"key": "4", "duration_s": 1.0, "n_frames": 10}])
    clip = ClipField(length_s=0.3, fps=10)
    field = VideoField(clip=clip, num_clips=2, frames="frames", frames_fps=10)
    options: dict[str, Any] = {"image": None, "columns": (), "fields": {"clips": field}, "shuffle": False}
    batches = list(Loader(store.refresh().select()[:4], batch_size=2, **options))
    assert [tuple(batch.tensors["clips"].shape) for batch in batches] == [(2, 2, 3, 48, 64, 3)] * 2
    with pytest.raises(
        SampleError, match=r"sample '4' \(row 4\): the row has no video, and no stored frames"
    ):
        list(Loader(store.refresh().select(), batch_size=5, **options))
