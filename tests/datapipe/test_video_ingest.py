"""Videos from folders, tars and tables into the store, and frames out of it."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datapipe import ingest
from datapipe.decode.video import VideoReader
from storage import FeatureStore
from tools.video_clips import make_clip, make_sound, read_number, set_turn

GOOD = {
    "a.mp4": (make_clip(12), {"width": 64, "height": 48, "n_frames": 12, "format": "mp4", "codec": "h264"}),
    "b.mov": (
        set_turn(make_clip(5, container="mov"), 90),
        {"width": 48, "height": 64, "n_frames": 5, "rotation": 90, "format": "mov"},
    ),
    "c.mkv": (make_clip(9, container="matroska"), {"header_frames": 0, "n_frames": 9, "format": "mkv"}),
    "d.webm": (
        make_clip(6, codec="libvpx", container="webm"),
        {"codec": "vp8", "format": "webm", "is_vfr": False},
    ),
    "e.avi": (
        make_clip(6, codec="mpeg4", container="avi", b_frames=0),
        {"codec": "mpeg4", "had_audio": False, "fps": pytest.approx(30)},
    ),
    "f.mp4": (
        make_clip(8, has_sound=True),
        {"had_audio": True, "duration_s": pytest.approx(8 / 30, abs=1e-3), "damaged_fraction": 0.0},
    ),
}
BAD = {
    "empty.mp4": (b"", "empty"),
    "start.mp4": (GOOD["a.mp4"][0][:600], "no_moov"),
    "cut.mkv": (GOOD["c.mkv"][0][:-300], "truncated"),
    "sound.mp4": (make_sound(), "no_video_stream"),
    "other.mp4": (make_clip(2).replace(b"avc1", b"zzzz"), "unsupported_codec"),
}


def reasons(store: FeatureStore) -> dict[str, str]:
    table = store.quarantined()
    places = [place.rpartition("/")[2] for place in table.column("place").to_pylist()]
    return dict(zip(places, (text.partition(":")[0] for text in table.column("reason").to_pylist())))


def check_rows(store: FeatureStore, prefix: str = "") -> None:
    for name, (_, columns) in GOOD.items():
        key = prefix + name.partition(".")[0]
        found = store.select(f"key = '{key}'").to_arrow(["modality", "caption", *columns]).to_pylist()
        assert len(found) == 1, key
        assert found[0]["modality"].startswith("video")
        assert {column: found[0][column] for column in columns} == columns
        assert found[0]["caption"] == f"clip {name}"


def test_a_folder_of_videos(tmp_path: Path) -> None:
    source = tmp_path / "clips"
    source.mkdir()
    for name, (data, _) in {**GOOD, **BAD}.items():
        (source / name).write_bytes(data)
        (source / name).with_suffix(".txt").write_text(f"clip {name}\n")
    report = ingest(source, tmp_path / "store", max_bad_fraction=0.9, progress=False)
    store = FeatureStore.open(tmp_path / "store")
    assert len(store.select().rows) == len(GOOD)
    codecs = Counter(str(facts.get("codec", "h264")) for _, facts in GOOD.values())
    assert report.codecs == codecs and store.select("codec = 'vp8'").rows.size == codecs["vp8"]
    check_rows(store)
    assert reasons(store) == {name: reason for name, (_, reason) in BAD.items()}


def test_frames_come_straight_out_of_the_store(tmp_path: Path) -> None:
    source = tmp_path / "clips"
    source.mkdir()
    (source / "a.mp4").write_bytes(GOOD["a.mp4"][0])
    (source / "a.txt").write_text("twelve")
    ingest(source, tmp_path / "store", progress=False)
    store = FeatureStore.open(tmp_path / "store")
    row = store.row("a")
    count = store.select("key = 'a'").to_arrow(["n_frames"]).column("n_frames")[0].as_py()
    with VideoReader(store.blob(row), num_frames=count) as reader:
        assert [read_number(frame) for frame in reader.frames([11, 0, 5])] == [11, 0, 5]


def test_a_tar_of_videos(tmp_path: Path) -> None:
    path = tmp_path / "s0.tar"
    with tarfile.open(path, "w") as tar:
        for name, (data, _) in GOOD.items():
            for member, content in (
                (name, data),
                (f"{name.partition('.')[0]}.txt", f"clip {name}".encode()),
            ):
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    ingest(path, tmp_path / "store", progress=False)
    check_rows(FeatureStore.open(tmp_path / "store"), prefix="s0/")


@pytest.mark.parametrize("has_paths", [False, True])
def test_a_table_of_videos(tmp_path: Path, has_paths: bool) -> None:
    for name, (data, _) in GOOD.items():
        if has_paths:
            (tmp_path / name).write_bytes(data)
    names = list(GOOD)
    table = pa.table(
        {
            "key": [name.partition(".")[0] for name in names],
            "video": names if has_paths else [GOOD[name][0] for name in names],
            "caption": [f"clip {name}" for name in names],
        }
    )
    pq.write_table(table, tmp_path / "clips.parquet")
    ingest(tmp_path / "clips.parquet", tmp_path / "store", progress=False)
    check_rows(FeatureStore.open(tmp_path / "store"))
