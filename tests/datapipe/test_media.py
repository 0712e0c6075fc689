"""What is stored of one picture: as it came, resized, in another encoding, frame by frame, as tensors."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import xxhash
from PIL import Image

from datapipe import BadFractionError, ingest
from datapipe.decode import decode_image, perceptual_hash, phash_distance
from datapipe.errors import DecodeError
from datapipe.media import MEDIA_KINDS, Media, judge_media
from datapipe.media_rules import MediaRules, parse_encoding, parse_resizing, parse_tensor
from datapipe.sources.fields import INDEX_COLUMNS
from storage import FeatureStore


def picture(width: int = 64, height: int = 40, seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def judged(data: bytes, **rules: object) -> Media:
    (media,) = judge_media(data, MediaRules(**rules))  # type: ignore[arg-type]
    assert media.columns.keys() <= MEDIA_KINDS.keys()
    return media


def animation(format: str = "GIF") -> bytes:
    frames = [Image.new("RGB", (10, 6), colour) for colour in ("red", "lime", "blue")]
    return encode(frames[0], format, save_all=True, append_images=frames[1:])


def test_no_column_of_ours_can_be_overwritten_by_a_source() -> None:
    assert MEDIA_KINDS.keys() <= INDEX_COLUMNS


def test_a_picture_as_it_came() -> None:
    data = encode(picture(), "JPEG", quality=95)
    media = judged(data)
    assert media.blob is data and media.kind == "image" and not media.tensors
    phash = str(media.columns["phash"])
    assert len(phash) == 16 and phash_distance(phash, perceptual_hash(np.asarray(picture()))) <= 6
    assert "source_hash" not in media.columns and "frame" not in media.columns


def test_trust_reads_the_header_alone() -> None:
    data = encode(picture(), "PNG")
    cut = data[: len(data) // 2]
    media = judged(cut, trust=True)
    assert (media.columns["width"], media.columns["height"], media.blob) == (64, 40, cut)
    assert "phash" not in media.columns
    with pytest.raises(DecodeError, match="truncated"):
        judged(cut)
    with pytest.raises(DecodeError, match="the budget is 99"):
        judged(cut, trust=True, max_pixels=99)
    with pytest.raises(DecodeError, match="multi_frame"):
        judged(animation(), trust=True, frames="skip")


@pytest.mark.parametrize(("format", "stored"), [("JPEG", "jpeg"), ("WEBP", "png"), ("PNG", "png")])
def test_a_resized_picture(format: str, stored: str) -> None:
    tags = Image.Exif()
    tags[0x0112] = 6
    data = encode(picture(), format, exif=tags, quality=95)
    media = judged(data, resize=parse_resizing("32"))
    assert media.columns["format"] == stored
    assert (media.columns["width"], media.columns["height"]) == (20, 32)
    assert media.columns["exif_orientation"] == 6
    assert media.columns["source_hash"] == xxhash.xxh3_128_hexdigest(data)
    found = decode_image(media.blob)
    wanted = decode_image(data, size=(32, 20))
    assert np.abs(found.astype(int) - wanted).mean() < 5


def test_a_picture_that_is_small_enough_keeps_its_bytes() -> None:
    data = encode(picture(), "JPEG")
    media = judged(data, resize=parse_resizing("64"))
    assert media.blob is data and "source_hash" not in media.columns
    assert judged(data, resize=parse_resizing("64"), encoding=parse_encoding("png")).blob != data


@pytest.mark.parametrize("encoding", ["jpeg:90", "webp:90", "png"])
def test_another_encoding(encoding: str) -> None:
    data = encode(picture(), "BMP")
    media = judged(data, encoding=parse_encoding(encoding))
    assert media.columns["format"] == encoding.partition(":")[0]
    assert np.abs(decode_image(media.blob).astype(int) - np.asarray(picture())).mean() < 4


def test_tensors_are_made_of_the_whole_picture() -> None:
    data = encode(picture(), "PNG")
    rules = tuple(map(parse_tensor, ("a:uint8[3,20,32]", "b:float16[3,20,32]", "c:float32[3,40,64]")))
    media = judged(data, tensors=rules, resize=parse_resizing("8"))
    wanted = decode_image(data, size=(20, 32)).transpose(2, 0, 1)
    np.testing.assert_array_equal(media.tensors["a"], wanted)
    np.testing.assert_allclose(media.tensors["b"], wanted / 127.5 - 1, atol=1e-3)
    np.testing.assert_allclose(
        media.tensors["c"], np.asarray(picture()).transpose(2, 0, 1) / 127.5 - 1, atol=1e-6
    )
    assert [array.dtype.name for array in media.tensors.values()] == ["uint8", "float16", "float32"]
    assert media.columns["width"] == 8


@pytest.mark.parametrize("format", ["GIF", "PNG", "TIFF"])
def test_frames_become_entries_of_their_own(format: str) -> None:
    data = animation(format)
    found = judge_media(data, MediaRules(frames="all"))
    colours = [decode_image(media.blob)[0, 0].tolist() for media in found]
    assert colours == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    assert [media.columns["frame"] for media in found] == [0, 1, 2]
    assert {media.columns["format"] for media in found} == {"png"}
    assert {media.columns["source_hash"] for media in found} == {xxhash.xxh3_128_hexdigest(data)}
    first = judged(data)
    assert (first.blob, first.columns["frame"], first.columns["n_frames"]) == (data, 0, 3)
    with pytest.raises(DecodeError, match="frames=first takes the first") as caught:
        judged(data, frames="skip")
    assert caught.value.reason == "multi_frame"
    still = encode(picture(), format)
    assert judged(still, frames="skip").blob == judged(still, frames="all").blob == still


def test_frames_in_a_store(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.gif").write_bytes(animation())
    (folder / "b.png").write_bytes(encode(picture(), "PNG"))
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"caption {name}")
    report = ingest(folder, tmp_path / "store", frames="all")
    assert (report.num_added, report.num_multi_frame) == (4, 3)
    view = FeatureStore.open(tmp_path / "store").select()
    assert view.keys() == ["a/frame-00000", "a/frame-00001", "a/frame-00002", "b"]
    assert view.column("frame").to_pylist() == [0, 1, 2, None]
    assert view.column("caption").to_pylist() == ["caption a"] * 3 + ["caption b"]
    (folder / "c.txt").write_text("one more")
    (folder / "c.png").write_bytes(encode(picture(seed=1), "PNG"))
    again = ingest(folder, tmp_path / "store", frames="all")
    assert (again.num_added, again.num_skipped, again.num_left_out) == (1, 4, 0)
    with pytest.raises(BadFractionError) as caught:
        ingest(folder, tmp_path / "other", frames="skip")
    assert caught.value.report.reasons == {"multi_frame": 1}


def test_tensors_in_a_store_leave_out_what_has_no_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode(picture(), "PNG"))
    (tmp_path / "t.jsonl").write_text('{"image": "a.png", "caption": "seen"}\n{"caption": "only text"}\n')
    report = ingest(
        tmp_path / "t.jsonl",
        tmp_path / "store",
        optional=["image"],
        tensors=["pixels:uint8[3,4,5]"],
        commit_rows=1,
    )
    assert report.num_added == 2
    store = FeatureStore.open(tmp_path / "store")
    assert store.tensor_columns == {"pixels": (np.dtype("uint8"), (3, 4, 5))}
    wanted = decode_image(bytes(store.blob(0)), size=(4, 5)).transpose(2, 0, 1)
    np.testing.assert_array_equal(store.tensor("pixels").gather(np.array([0]))[0], wanted)
    assert store.verify().ok
