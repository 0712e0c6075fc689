"""Telling containers by content, and files that end before what they declare."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.decode.video import scan_video, sniff_container
from datapipe.decode.video.boxes import claimed_samples
from datapipe.decode.video.packets import PacketLog, _is_h264_entry
from datapipe.errors import DecodeError
from tools.video_clips import add_sample_to_header, make_clip, make_sound


@pytest.mark.parametrize(
    ("muxer", "name"),
    [
        ("mp4", "mp4"),
        ("mov", "mov"),
        ("matroska", "mkv"),
        ("webm", "webm"),
        ("avi", "avi"),
        ("mpegts", "mpegts"),
        ("flv", "flv"),
    ],
)
def test_what_a_muxer_writes_is_told_by_content(muxer: str, name: str) -> None:
    codec = {"webm": "libvpx", "flv": "flv"}.get(muxer, "mpeg4")
    container = sniff_container(make_clip(2, codec=codec, container=muxer, b_frames=0))
    assert container is not None
    assert container.name == name


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x00\x00\x00\x18ftypavif\x00\x00\x00\x00avifmif1",
        b"\x00\x00\x00\x18ftypmif1\x00\x00\x00\x00mif1heic",
        b"\xff\xd8\xff\xe0\x00\x10JFIF",
        b"RIFF\x24\x00\x00\x00WEBPVP8 ",
        b"GIF89a",
        b"<!doctype html>",
        b"GGGG plain text that starts with a G",
    ],
)
def test_pictures_and_text_are_no_videos(head: bytes) -> None:
    assert sniff_container(head) is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<html><body>403</body></html>", "html"),
        (b'{"error": "gone"}', "json"),
        (b"version https://git-lfs.github.com/spec/v1", "lfs_pointer"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "not_a_video"),
        (bytes(4096), "not_a_video"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "not_a_video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not_a_video"),
    ],
)
def test_what_is_no_video_has_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError) as error:
        scan_video(data)
    assert error.value.reason == reason


@pytest.mark.parametrize("muxer", ["matroska", "avi"])
def test_a_cut_file_is_truncated(muxer: str) -> None:
    clip = make_clip(40, codec="mpeg4", container=muxer, b_frames=0)
    with pytest.raises(DecodeError, match="declares") as error:
        scan_video(clip[: len(clip) // 2])
    assert error.value.reason == "truncated"


def test_a_cut_file_with_its_index_in_front_is_truncated() -> None:
    clip = make_clip(40, container_options={"movflags": "frag_keyframe+empty_moov"}, group=10)
    assert scan_video(clip).frames == 40
    with pytest.raises(DecodeError) as error:
        scan_video(clip[: len(clip) - 400])  # within the last fragment
    assert error.value.reason == "truncated"


@pytest.mark.parametrize("trailer", [b"junk" * 100, b"SEFT\0\1\2\3\xff\xff\xff\xffSEFT", b"\xff" * 9])
def test_bytes_behind_the_last_box_cost_nothing(trailer: bytes) -> None:
    clip = make_clip(30)
    assert scan_video(clip + trailer).frames == scan_video(clip).frames == 30
    with pytest.raises(DecodeError) as error:
        scan_video(clip + b"\0\0\1\0moof" + trailer[:8])
    assert error.value.reason == "truncated"


def test_special_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    (tmp_path / "folder.mp4").mkdir()
    for name, reason in (
        ("pipe.mp4", "not_a_file"),
        ("folder.mp4", "not_a_file"),
        ("no.mp4", "unreadable_file"),
    ):
        with pytest.raises(DecodeError) as error:
            scan_video(tmp_path / name)
        assert error.value.reason == reason


def test_the_codec_that_cannot_be_decoded_is_named() -> None:
    clips = {
        "V_QUATSCH4/ISOC": make_clip(3, container="matroska").replace(b"V_MPEG4/ISO/AVC", b"V_QUATSCH4/ISOC"),
        "ZZZZ": make_clip(3, codec="mpeg4", container="avi", b_frames=0).replace(b"FMP4", b"ZZZZ"),
    }
    for name, clip in clips.items():
        with pytest.raises(DecodeError, match=name) as error:
            scan_video(clip)
        assert error.value.reason == "unsupported_codec"


def test_the_sample_table_tells_its_claim() -> None:
    clip = make_clip(7)
    for data, claim in (
        (clip, 7),
        (add_sample_to_header(clip), 8),
        (make_sound(), 0),
        (b"\0\0\0\x08free", 0),
    ):
        assert claimed_samples(io.BytesIO(data), len(data)) == claim


@pytest.mark.parametrize(
    ("unit", "is_entry"),
    [
        (b"\x65\x88\x84\x00", True),  # IDR slice
        (b"\x41\x9a\x24\x00", False),  # slice that refers to others
        (b"\x06\x06\x01\xc4\x80", True),  # recovery point: 0 frames to go, exact
        (b"\x06\x06\x01\x84\x80", False),  # recovery point: 0 frames to go, not exact
        (b"\x06\x06\x02\x12\x80", False),  # recovery point: some frames to go
        (b"\x06\x05\x10\xdc", False),  # user data
    ],
)
def test_entry_points_of_h264(unit: bytes, is_entry: bool) -> None:
    assert _is_h264_entry(unit) == is_entry


def test_a_log_without_packets_is_empty() -> None:
    log = PacketLog("h264", None)
    assert len(log.pts) == len(log.entry_pts) == log.num_packets == 0


CLIP = make_clip(8, group=4, b_frames=1)


@given(st.data())
def test_damaged_heads_give_reasons_and_never_crash(data: st.DataObject) -> None:
    changed = bytearray(CLIP)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(CLIP) - 1))] = data.draw(st.integers(0, 255))
    stop = data.draw(st.one_of(st.just(len(CLIP)), st.integers(0, len(CLIP))))
    try:
        info = scan_video(bytes(changed[:stop]), max_damaged=1.0, max_pixels=10**6)
    except DecodeError as error:
        assert error.reason
    else:
        assert len(info.pts) == info.frames > 0
        assert (np.diff(info.pts) > 0).all()
