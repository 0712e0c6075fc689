"""Field cases of WebDataset tars: nothing is halved, merged or lost in silence."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datapipe import BadFractionError, ImageField, IngestReport, Loader, ingest
from storage import FeatureStore


def png(seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def pairs(*names: str) -> list[tuple[str, bytes]]:
    return [
        member
        for index, name in enumerate(names)
        for member in ((f"{name}.png", png(index)), (f"{name}.txt", f"caption {name}".encode()))
    ]


def run(source: Path | list[Path] | str, tmp_path: Path, **options: object) -> IngestReport:
    """Ingest and give the report, over budget or not."""
    try:
        # One picture serves many samples here.
        return ingest(source, tmp_path / "store", duplicates="keep", **options)  # type: ignore[arg-type]
    except BadFractionError as error:
        return error.report


def stored_keys(tmp_path: Path) -> list[str]:
    return FeatureStore.open(tmp_path / "store").select().keys()


def test_tar_01_dotted_names(tmp_path: Path) -> None:
    members = [
        *(("img_2.0 v.jpg", png(1)), ("img_2.0 v.txt", b"dotted")),
        ("22.05.png", png(2)),
        *(("train.v1/0001.png", png(3)), ("train.v1/0001.txt", b"folder one")),
        *(("train.v2/0001.png", png(4)), ("train.v2/0001.txt", b"folder two")),
        *(("./0001.png", png(5)), ("0001.txt", b"dot slash")),
    ]
    write_tar(tmp_path / "s.tar", members)
    report = run(tmp_path / "s.tar", tmp_path)
    assert report.reasons == {"dotted_name": 2}
    details = " ".join(example.detail for example in report.examples["dotted_name"])
    assert "'0 v.jpg'" in details and "'img_2.0 v.jpg'" in details and "'05.png'" in details
    assert "split at the last dot" in details
    assert sorted(stored_keys(tmp_path)) == ["s/0001", "s/train.v1/0001", "s/train.v2/0001"]


def test_tar_01_split_at_the_last_dot(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", [("img_2.0 v.jpg", png(1)), ("img_2.0 v.txt", b"dotted")])
    assert run(tmp_path / "s.tar", tmp_path, split_dot="last").num_added == 1
    assert stored_keys(tmp_path) == ["s/img_2.0 v"]


def test_tar_02_split_samples(tmp_path: Path) -> None:
    a, b = pairs("a"), pairs("b")
    write_tar(tmp_path / "s.tar", [a[0], b[0], a[1], b[1], *pairs("c")])
    report = run(tmp_path / "s.tar", tmp_path)
    assert report.reasons == {"split_sample": 2}
    first = report.examples["split_sample"][0]
    assert first.key == "s/a" and "s.tar" in first.place
    assert "'a.png' @0" in first.detail and "'a.txt'" in first.detail
    assert stored_keys(tmp_path) == ["s/c"]


def test_tar_02_a_late_member_takes_its_whole_sample_along(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", [*pairs("a"), *pairs("b"), ("a.json", b'{"x": 1}')])
    report = run(tmp_path / "s.tar", tmp_path)
    assert (report.reasons, stored_keys(tmp_path)) == ({"split_sample": 1}, ["s/b"])


def test_tar_03_duplicate_members(tmp_path: Path) -> None:
    a = pairs("a")
    write_tar(tmp_path / "s.tar", [a[0], a[0], a[1], *pairs("b")])
    report = run(tmp_path / "s.tar", tmp_path)
    assert report.reasons == {"duplicate_member": 1}
    example = report.examples["duplicate_member"][0]
    assert example.key == "s/a" and "s.tar" in example.place
    second = 512 + -(-len(a[0][1]) // 512) * 512
    assert "@0" in example.detail and f"@{second}" in example.detail
    assert stored_keys(tmp_path) == ["s/b"]


def test_tar_04_missing_members(tmp_path: Path) -> None:
    members = [*pairs("a"), ("b.png", png(7)), *pairs("c"), ("d.txt", b"no picture")]
    write_tar(tmp_path / "s.tar", members)
    report = run(tmp_path / "s.tar", tmp_path)
    assert report.reasons == {"caption_missing": 1, "image_missing": 1}
    assert stored_keys(tmp_path) == ["s/a", "s/c"]
    both = run(tmp_path / "s.tar", tmp_path, optional=("caption", "image"))
    assert (both.num_bad, both.num_added, both.num_skipped) == (0, 2, 2)
    view = FeatureStore.open(tmp_path / "store").select()
    assert dict(zip(view.keys(), view.column("modality").to_pylist())) == {
        **{"s/a": "image+text", "s/b": "image", "s/c": "image+text", "s/d": "text"}
    }


def test_tar_05_truncated_tar_keeps_its_good_samples(tmp_path: Path) -> None:
    whole = tmp_path / "whole.tar"
    write_tar(whole, [*pairs("a", "b"), ("c.png", b"\x89PNG" + b"x" * 4996), ("c.txt", b"cut away")])
    with tarfile.open(whole) as tar:
        start = tar.getmember("c.png").offset_data
    cut = tmp_path / "s.tar"
    cut.write_bytes(whole.read_bytes()[: start + 2000])
    report = run(cut, tmp_path)
    assert report.reasons == {"truncated_tar": 1}
    example = report.examples["truncated_tar"][0]
    assert "'c.png': 2000 of its 5000 bytes" in example.detail and f"@{start - 512}" in example.place
    assert stored_keys(tmp_path) == ["s/a", "s/b"]
    again = run(cut, tmp_path)
    assert (again.num_added, again.num_skipped, again.num_bad) == (0, 2, 1)
    cut.write_bytes(whole.read_bytes())
    assert run(cut, tmp_path).num_skipped == 2


def test_tar_05_truncated_gzip(tmp_path: Path) -> None:
    whole = tmp_path / "whole.tar"
    write_tar(whole, pairs(*(f"{index:03d}" for index in range(30))))
    packed = gzip.compress(whole.read_bytes(), mtime=0)
    (tmp_path / "s.tar.gz").write_bytes(packed[: len(packed) * 2 // 3])
    report = run(tmp_path / "s.tar.gz", tmp_path)
    assert report.reasons == {"truncated_tar": 1}
    keys = stored_keys(tmp_path)
    assert 5 < len(keys) < 30 and keys == [f"s/{index:03d}" for index in range(len(keys))]


def test_tar_05_damaged_header_and_joined_tars_are_not_the_end(tmp_path: Path) -> None:
    write_tar(tmp_path / "one.tar", pairs("a", "b"))
    write_tar(tmp_path / "two.tar", pairs("c"))
    data = bytearray((tmp_path / "one.tar").read_bytes())
    (tmp_path / "joined.tar").write_bytes(bytes(data) + (tmp_path / "two.tar").read_bytes())
    with tarfile.open(tmp_path / "one.tar") as tar:
        offset = tar.getmember("b.png").offset
    data[offset + 100] ^= 0xFF
    (tmp_path / "damaged.tar").write_bytes(bytes(data))
    report = run([tmp_path / "joined.tar", tmp_path / "damaged.tar"], tmp_path)
    assert report.reasons == {"data_after_end": 1, "bad_tar_header": 1}
    assert f"damaged.tar @{offset}" in report.examples["bad_tar_header"][0].place
    assert stored_keys(tmp_path) == ["joined/a", "joined/b", "damaged/a"]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_tar_09_long_names(tmp_path: Path, format: int) -> None:
    name = "ü" * 30 + "/" + "日本語" * 30 + "x" * 180
    write_tar(tmp_path / "s.tar", pairs(name), format)
    assert run(tmp_path / "s.tar", tmp_path).num_bad == 0
    assert stored_keys(tmp_path) == [f"s/{name}"]


def test_tar_09_junk_pax_numbers(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in [*pairs("a"), ("b.png", png(3))]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if name == "b.png":
                member.pax_headers = {"GNU.sparse.size": "junk", "GNU.sparse.map": "0,junk"}
            tar.addfile(member, io.BytesIO(data))
    report = run(tmp_path / "s.tar", tmp_path)
    assert set(report.reasons) <= {"bad_tar_header", "caption_missing"} and report.num_bad == 1
    assert stored_keys(tmp_path) == ["s/a"]


def test_tar_09_paths_never_leave_the_folder(tmp_path: Path) -> None:
    members = [*pairs("../../evil", "/etc/evil", "ok/../fine", "C:\\evil"), *pairs("good")]
    write_tar(tmp_path / "s.tar", members)
    report = run(tmp_path / "s.tar", tmp_path)
    assert report.reasons == {"unsafe_path": 6}
    assert stored_keys(tmp_path) == ["s/ok/../fine", "s/good"]
    assert {path.name for path in tmp_path.iterdir()} == {"s.tar", "store"}


def test_tar_10_same_keys_in_two_tars(tmp_path: Path) -> None:
    write_tar(tmp_path / "s0.tar", [("0001.png", png(1)), ("0001.txt", b"one")])
    write_tar(tmp_path / "s1.tar", [("0001.png", png(2)), ("0001.txt", b"two")])
    report = run(str(tmp_path / "s{0..1}.tar"), tmp_path)
    assert (report.num_added, report.num_bad) == (2, 0)
    assert stored_keys(tmp_path) == ["s0/0001", "s1/0001"]
    store = FeatureStore.open(tmp_path / "store")
    assert [bytes(store.blob(row)) for row in range(2)] == [png(1), png(2)]


def test_tar_10_without_prefix_the_second_is_reported(tmp_path: Path) -> None:
    write_tar(tmp_path / "s0.tar", [("0001.png", png(1)), ("0001.txt", b"one")])
    write_tar(tmp_path / "s1.tar", [("0001.png", png(2)), ("0001.txt", b"two")])
    report = run(str(tmp_path / "s*.tar"), tmp_path, key_prefix="")
    assert (report.num_added, report.reasons) == (1, {"duplicate_key": 1})
    detail = report.examples["duplicate_key"][0].detail
    assert "s0.tar!0001.png" in detail and "s1.tar!0001.png" in detail


def test_tar_11_one_tar_feeds_any_number_of_ranks(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", pairs(*"abcdef"))
    run(tmp_path / "s.tar", tmp_path)
    view = FeatureStore.open(tmp_path / "store").select()
    image = ImageField(size=(6, 5))
    shares = [
        [
            key
            for batch in Loader(view, batch_size=4, image=image, drop_last=False, rank=rank, world_size=4)
            for key in batch.keys
        ]
        for rank in range(4)
    ]
    assert sorted(key for share in shares for key in share) == sorted(view.keys())
    with pytest.raises(ValueError, match="less than the 4 ranks"):
        Loader(view, batch_size=3, image=image, world_size=4)


@pytest.mark.parametrize("threads", [1, 4])
def test_tar_12_an_epoch_has_every_sample_once(tmp_path: Path, threads: int) -> None:
    write_tar(tmp_path / "s.tar", pairs(*(f"{index:02d}" for index in range(23))))
    run(tmp_path / "s.tar", tmp_path)
    view = FeatureStore.open(tmp_path / "store").select()
    loader = Loader(view, batch_size=5, image=ImageField(size=(6, 5)), drop_last=False, num_threads=threads)
    keys = [key for batch in loader for key in batch.keys]
    assert len(loader) == 5 and sorted(keys) == sorted(view.keys())
