"""Ingest as a whole: good rows land, bad ones are told, reruns and kills lose and double nothing."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from datapipe import BadFractionError, DataError, SourceError, ingest
from storage import FeatureStore


def encoded(seed: int, format: str = "PNG", side: int = 12) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 2, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format)
    return buffer.getvalue()


def write_folder(folder: Path, num: int) -> Path:
    folder.mkdir(parents=True)
    for index in range(num):
        (folder / f"{index:04d}.png").write_bytes(encoded(index))
        (folder / f"{index:04d}.txt").write_text(f"picture {index}\n")
    return folder


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """The folder of faults that people really have, with four good pictures in it."""
    folder = write_folder(tmp_path / "faulty", 3)
    jpeg = encoded(50, "JPEG", side=64)
    files = {
        "cut.jpg": jpeg[: len(jpeg) // 2],
        "zero.png": b"",
        "page.jpg": b"<!DOCTYPE html><html><body>moved</body></html>",
        "silent.png": encoded(51),
        "twice.jpg": jpeg,
        "twice.png": encoded(52),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    for stem in ("cut", "zero", "page", "twice"):
        (folder / f"{stem}.txt").write_text(f"the {stem}")
    return folder


REASONS = {"truncated": 1, "empty": 1, "html": 1, "caption_missing": 1, "duplicate_key": 1}


def test_the_folder_of_faults(faulty: Path, tmp_path: Path) -> None:
    with pytest.raises(BadFractionError) as caught:
        ingest(faulty, tmp_path / "store", progress=False)
    report = caught.value.report
    assert (report.num_added, report.num_bad, report.num_seen) == (4, 5, 9)
    assert dict(report.reasons) == REASONS
    places = {reason: found[0].place for reason, found in report.examples.items()}
    assert places == {
        "truncated": f"{faulty}/cut.jpg",
        "empty": f"{faulty}/zero.png",
        "html": f"{faulty}/page.jpg",
        "caption_missing": f"{faulty}/silent.png",
        "duplicate_key": f"{faulty}/twice.png",
    }
    assert f"{faulty}/twice.jpg and at {faulty}/twice.png" in report.examples["duplicate_key"][0].detail
    message = str(caught.value)
    assert (
        "5 of 9 samples (55.56%)" in message
        and "1 html" in message
        and "4 good ones are committed" in message
    )
    store = FeatureStore.open(tmp_path / "store")
    assert store.select().keys() == ["0000", "0001", "0002", "twice"]
    refused = {Path(row["place"]).name: row for row in store.quarantined().to_pylist()}
    assert set(refused) == {"cut.jpg", "zero.png", "page.jpg", "silent.png", "twice.png"}
    assert refused["cut.jpg"]["data"] == (faulty / "cut.jpg").read_bytes()
    saved = json.loads((tmp_path / "store/reports" / f"ingest-{report.snapshot:08d}.json").read_text())
    assert saved == json.loads(report.to_json()) and saved["is_over_budget"] is True


def test_a_budget_that_is_wide_enough_is_a_success(faulty: Path, tmp_path: Path) -> None:
    assert ingest(faulty, tmp_path / "store", max_bad_fraction=0.6).num_added == 4
    with pytest.raises(BadFractionError):
        ingest(faulty, tmp_path / "store", max_bad_fraction=0.5)


def test_a_rerun_adds_nothing_and_tells_the_same(faulty: Path, tmp_path: Path) -> None:
    first = ingest(faulty, tmp_path / "store", max_bad_fraction=1)
    again = ingest(faulty, tmp_path / "store", max_bad_fraction=1)
    assert (again.num_added, again.num_skipped, again.reasons) == (0, 4, first.reasons)
    assert again.snapshot == first.snapshot
    assert FeatureStore.open(tmp_path / "store").quarantined().num_rows == 5


def test_repaired_files_land_on_a_rerun(faulty: Path, tmp_path: Path) -> None:
    ingest(faulty, tmp_path / "store", max_bad_fraction=1)
    (faulty / "cut.jpg").write_bytes(encoded(50, "JPEG"))
    (faulty / "silent.txt").write_text("no longer")
    again = ingest(faulty, tmp_path / "store", max_bad_fraction=1)
    assert (again.num_added, again.num_skipped, again.num_bad) == (2, 4, 3)


def test_blobs_stand_as_they_came_and_columns_tell_about_them(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rgba = Image.new("RGBA", (5, 7), (1, 2, 3, 100))
    rgba.save(folder / "a.png")
    rows = [{"file_name": "a.png", "caption": "see-through", "split": "sft", "held_out": False, "width": 9}]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = ingest(folder, tmp_path / "store")
    assert (report.num_with_alpha, report.formats, report.modes) == (1, {"png": 1}, {"RGBA": 1})
    store = FeatureStore.open(tmp_path / "store")
    assert bytes(store.blob(0)) == (folder / "a.png").read_bytes()
    found = store.select().to_arrow().to_pylist()[0]
    assert (
        found
        | {
            **{"key": "a", "source": str(folder), "place": "metadata.jsonl:1", "modality": "image+text"},
            **{
                "caption": "see-through",
                "width": 5,
                "height": 7,
                "format": "png",
                "mode": "RGBA",
                "had_alpha": True,
            },
            **{"exif_orientation": 1, "n_frames": 1, "split": "sft", "held_out": False, "user_width": 9},
        }
        == found
    )
    assert len(store.select("not held_out and split = 'sft'")) == 1


def test_a_picture_is_stored_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", 2)
    for name, caption in (("copy", "picture 1\n"), ("other", "another text")):
        (folder / f"{name}.png").write_bytes(encoded(1))
        (folder / f"{name}.txt").write_text(caption)
    report = ingest(folder, tmp_path / "store")
    assert (report.num_added, report.num_left_out, report.num_duplicate_content) == (3, 1, 1)
    assert (report.num_seen, report.num_bad) == (4, 0)
    example = report.duplicate_examples[0]
    assert example.place == f"{folder}/copy.png"
    assert example.detail == f"the same sample as {folder}/0001.png"
    assert report.num_shared_pictures == 1
    store = FeatureStore.open(tmp_path / "store")
    assert store.select().keys() == ["0000", "0001", "other"]
    (folder / "late.png").write_bytes(encoded(0))
    (folder / "late.txt").write_text("picture 0")
    again = ingest(folder, tmp_path / "store")
    assert (again.num_added, again.num_skipped, again.num_left_out) == (0, 3, 2)
    assert again.duplicate_examples[1].detail == f"the same sample as 0000.png of {folder}"
    kept = ingest(folder, tmp_path / "kept", duplicates="keep")
    assert (kept.num_added, kept.num_left_out, kept.num_duplicate_content) == (5, 0, 2)


def test_samples_that_differ_in_a_column_are_two(tmp_path: Path) -> None:
    rows = [
        {"image": encoded(1), "caption": "x", "url": f"u{index // 2}", "n": index // 2} for index in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    report = ingest(tmp_path / "t.parquet", tmp_path / "store")
    assert (report.num_added, report.num_left_out, report.num_shared_pictures) == (2, 2, 1)
    pq.write_table(pa.Table.from_pylist(rows[1:3]), tmp_path / "u.parquet")
    again = ingest(tmp_path / "u.parquet", tmp_path / "store")
    assert (again.num_added, again.num_left_out) == (0, 2)


def test_a_key_of_a_picture_that_was_left_out_is_free(tmp_path: Path) -> None:
    rows = [
        {"key": "a", "image": encoded(1), "caption": "x"},
        {"key": "b", "image": encoded(1), "caption": "x"},
        {"key": "b", "image": encoded(2), "caption": "x"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    report = ingest(tmp_path / "t.parquet", tmp_path / "store", commit_rows=1)
    assert (report.num_added, report.num_left_out) == (2, 1)
    assert "t.parquet#1 of" in report.duplicate_examples[0].detail
    assert FeatureStore.open(tmp_path / "store").select().keys() == ["a", "b"]


def test_rows_that_a_repair_gave_up_are_settled_when_they_come_again(tmp_path: Path) -> None:
    folder, store = write_folder(tmp_path / "set", 2), FeatureStore.create(tmp_path / "store")
    with store.writer(message="as a repair records them") as writer:
        for at, key in enumerate(("0", "another")):
            writer.quarantine(key=key, place=f"part ab, row {at}", reason="damaged: the blob is altered")
    keys = [path.stem for path in sorted(folder.glob("*.*")) if path.suffix != ".txt"]
    with store.refresh().writer(message="the other one") as writer:
        writer.quarantine(key=keys[0], place="part ab, row 7", reason="damaged: the blob is altered")
    ingest(folder, store.path, progress=False)
    left = FeatureStore.open(store.path).quarantined()
    assert "part ab, row 7" not in left.column("place").to_pylist()
    assert "part ab, row 1" in left.column("place").to_pylist()


def test_the_first_and_the_last_of_an_ingest_need_no_pandas(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", 3)
    program = (
        "import sys; from datapipe import ingest; "
        f"ingest({str(folder)!r}, {str(tmp_path / 'store')!r}, progress=False); "
        "sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_same_rows_from_a_moved_folder_are_known(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", 3)
    ingest(folder, tmp_path / "store")
    moved = folder.rename(tmp_path / "moved")
    assert ingest(moved, tmp_path / "store").num_skipped == 3
    (moved / "0001.png").write_bytes(encoded(77))
    with pytest.raises(BadFractionError) as caught:
        ingest(moved, tmp_path / "store")
    assert caught.value.report.reasons == {"duplicate_key": 1}
    assert f"0001.png of {folder}" in caught.value.report.examples["duplicate_key"][0].detail


def test_a_store_whose_making_was_killed_is_made(tmp_path: Path) -> None:
    (tmp_path / "store" / "snapshots").mkdir(parents=True)
    assert ingest(write_folder(tmp_path / "pictures", 2), tmp_path / "store").num_added == 2


def test_commits_are_cut_by_rows(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", 25)
    ingest(folder, tmp_path / "store", commit_rows=10)
    store = FeatureStore.open(tmp_path / "store")
    assert [snapshot.num_rows for snapshot in store.snapshots()] == [0, 10, 20, 25]
    assert store.select().keys() == [f"{index:04d}" for index in range(25)]


def test_commits_are_cut_by_time(tmp_path: Path) -> None:
    ingest(write_folder(tmp_path / "set", 3), tmp_path / "store", commit_s=0.0)
    assert [snapshot.num_rows for snapshot in FeatureStore.open(tmp_path / "store").snapshots()] == [
        0,
        1,
        2,
        3,
    ]


def test_a_key_met_in_an_earlier_commit_is_named(tmp_path: Path) -> None:
    rows = [{"key": f"k{index % 7}", "image": encoded(index), "caption": "x"} for index in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    with pytest.raises(BadFractionError) as caught:
        ingest(tmp_path / "t.parquet", tmp_path / "store", commit_rows=2)
    report = caught.value.report
    assert (report.num_added, report.reasons) == (7, {"duplicate_key": 2})
    assert "t.parquet#1 of" in report.examples["duplicate_key"][0].detail
    assert f"{tmp_path}/t.parquet#8" in report.examples["duplicate_key"][0].detail


@pytest.mark.parametrize("workers", [1, 4])
def test_rows_stand_in_the_order_of_the_source(tmp_path: Path, workers: int) -> None:
    folder = write_folder(tmp_path / "set", 30)
    ingest(folder, tmp_path / "store", workers=workers)
    assert FeatureStore.open(tmp_path / "store").select().keys() == [f"{index:04d}" for index in range(30)]


def test_text_without_pictures(tmp_path: Path) -> None:
    lines = [{"key": index, "text": f"draw the number {index}"} for index in range(5)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = ingest(tmp_path / "prompts.jsonl", tmp_path / "store", optional=["image"])
    store = FeatureStore.open(tmp_path / "store")
    assert report.num_added == 5 and store.select().keys() == list("01234")
    assert len(store.select("width > 100")) == 0
    assert (
        store.select("modality = 'text' and bytes is null").column("caption").to_pylist()[4]
        == lines[4]["text"]
    )


def test_a_request_to_stop_commits_what_is_whole(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", 20)
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) == 6

    report = ingest(folder, tmp_path / "store", should_stop=should_stop)
    assert report.is_interrupted and 5 <= report.num_added <= 6
    assert ingest(folder, tmp_path / "store").num_added == 20 - report.num_added
    assert len(FeatureStore.open(tmp_path / "store")) == 20


def test_a_dry_run_tells_and_writes_nothing(faulty: Path, tmp_path: Path) -> None:
    with pytest.raises(BadFractionError, match="nothing was written") as caught:
        ingest(faulty, tmp_path / "store", dry_run=100)
    report = caught.value.report
    assert (report.num_added, dict(report.reasons), report.is_dry_run) == (4, REASONS, True)
    assert not (tmp_path / "store").exists()
    ingest(faulty, tmp_path / "store", max_bad_fraction=1)
    before = FeatureStore.open(tmp_path / "store").snapshot.id
    again = ingest(faulty, tmp_path / "store", max_bad_fraction=1, dry_run=6)
    assert (again.num_added, again.num_seen) == (0, 6)
    assert FeatureStore.open(tmp_path / "store").snapshot.id == before
    few = ingest(write_folder(tmp_path / "many", 30), tmp_path / "other", dry_run=10)
    assert (few.num_added, few.num_seen) == (10, 10) and not (tmp_path / "other").exists()


def test_a_store_is_not_made_for_a_source_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for source, message in (
        ("photo", "did you mean .*photos"),
        ("x/*.tar", "no file matches"),
        ("s{0", "braces do not match"),
    ):
        with pytest.raises(SourceError, match=message):
            ingest(tmp_path / source, tmp_path / "store")
    with pytest.raises(SourceError, match="did you mean 'webdataset'"):
        ingest(tmp_path / "photos", tmp_path / "store", format="webdatset")
    with pytest.raises(DataError, match="optional holds \\['captions'\\]"):
        ingest(tmp_path / "photos", tmp_path / "store", optional=["captions"])
    with pytest.raises(DataError, match="max_bad_fraction is 2"):
        ingest(tmp_path / "photos", tmp_path / "store", max_bad_fraction=2)
    for option, value in (("workers", 1.5), ("commit_rows", 0), ("commit_s", -1.0), ("dry_run", 0)):
        with pytest.raises(DataError, match=f"{option} is {value}, wanted"):
            ingest(tmp_path / "photos", tmp_path / "store", **{option: value})
    assert not (tmp_path / "store").exists()


def test_a_folder_without_anything_to_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no picture and no metadata table, but no file at all"):
        ingest(tmp_path / "empty", tmp_path / "store")
    (tmp_path / "empty" / "deep").mkdir()
    (tmp_path / "empty" / "deep" / "s.tar").write_bytes(b"")
    with pytest.raises(SourceError, match=r"1 other files, such as deep/s\.tar"):
        ingest(tmp_path / "empty", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_table_without_rows_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image,caption\n")
    report = ingest(tmp_path / "t.csv", tmp_path / "store")
    assert (report.num_seen, report.bad_fraction, report.is_over_budget) == (0, 0.0, False)


def test_a_store_inside_its_source_is_left_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", 3)
    ingest(folder, folder / "store")
    assert ingest(folder, folder / "store").num_finished_sources == 1
    (folder / "0003.png").write_bytes(encoded(3))
    (folder / "0003.txt").write_text("picture 3")
    again = ingest(folder, folder / "store")
    assert (again.num_added, again.num_skipped, again.notes) == (1, 3, {"store_not_read": 1})


KILLED = textwrap.dedent(
    """
    import sys, time
    from datapipe import ingest
    from storage import FeatureStore
    calls = [0]

    def crawl():
        calls[0] += 1
        time.sleep(0.002)
        return False

    ingest(sys.argv[1], sys.argv[2], commit_rows=15, max_bad_fraction=1, should_stop=crawl)
    """
)


@pytest.mark.parametrize("num_commits", [1, 3, 5])
def test_sigkill_loses_and_doubles_nothing(faulty: Path, tmp_path: Path, num_commits: int) -> None:
    for index in range(200):
        (faulty / f"more{index:04d}.png").write_bytes(encoded(1000 + index))
        (faulty / f"more{index:04d}.txt").write_text(f"more {index}")
    store = tmp_path / "store"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(faulty), str(store)])
    deadline = time.monotonic() + 60
    while len(list((store / "snapshots").glob("0*.json"))) <= num_commits and time.monotonic() < deadline:
        time.sleep(0.002)
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = FeatureStore.open(store)
    assert before.verify().ok and 0 < len(before) < 204
    report = ingest(faulty, store, commit_rows=15, max_bad_fraction=1)
    after = FeatureStore.open(store)
    assert report.num_skipped == len(before) and report.num_added + report.num_skipped == 204
    assert dict(report.reasons) == REASONS
    keys = after.select().keys()
    assert len(keys) == len(set(keys)) == 204
    assert keys == ["0000", "0001", "0002", *(f"more{index:04d}" for index in range(200)), "twice"]
    assert sorted(Path(place).name for place in after.quarantined().column("place").to_pylist()) == [
        *("cut.jpg", "page.jpg", "silent.png", "twice.png", "zero.png")
    ]
    assert after.verify().ok
