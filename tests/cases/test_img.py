"""Field cases of images: what people's files really hold."""

from __future__ import annotations

import io
import resource
import struct
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from datapipe import BadFractionError, DecodeError, ingest
from datapipe.decode import decode_image, decode_image_with_facts
from storage import FeatureStore

EXIF_HEAD = b"Exif\0\0"


def gradient(width: int = 64, height: int = 32) -> np.ndarray:
    """Smooth and without any symmetry, so that JPEG keeps it and every rotation shows."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], -1).astype(
        np.uint8
    )


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def stored_for(upright: np.ndarray, orientation: int) -> np.ndarray:
    """The array that a camera stores, so that the orientation makes it upright."""
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    return np.ascontiguousarray(undo[orientation](upright))


def insert_app1(jpeg: bytes, payload: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload + jpeg[2:]


def assert_close(found: np.ndarray, wanted: np.ndarray, levels: float) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found.astype(int) - wanted.astype(int)).mean() <= levels


def test_img_01_exif_orientation() -> None:
    upright = gradient()
    for format, levels in (("JPEG", 1.5), ("PNG", 0.0), ("WEBP", 0.0), ("TIFF", 0.0)):
        options = {"quality": 95} if format == "JPEG" else {"lossless": True} if format == "WEBP" else {}
        for orientation in range(1, 9):
            stored = Image.fromarray(stored_for(upright, orientation))
            pixels, facts = decode_image_with_facts(encode(stored, format, exif=exif(orientation), **options))
            assert_close(pixels, upright, levels)
            assert (facts.exif_orientation, facts.width, facts.height) == (orientation, 64, 32)
            assert facts.notes == ()


def test_img_01_orientation_is_applied_once_on_the_way_to_a_batch(tmp_path: Path) -> None:
    from datapipe import ImageField, Loader

    upright = gradient()
    folder = tmp_path / "photos"
    folder.mkdir()
    for orientation in range(1, 9):
        stored = Image.fromarray(stored_for(upright, orientation))
        stored.save(folder / f"{orientation}.png", exif=exif(orientation))
        (folder / f"{orientation}.txt").write_text("a gradient")
    report = ingest(folder, tmp_path / "store")
    assert report.num_reoriented == 7
    view = FeatureStore.open(tmp_path / "store").select()
    assert set(zip(view.column("width").to_pylist(), view.column("height").to_pylist())) == {(64, 32)}
    assert sorted(view.column("exif_orientation").to_pylist()) == list(range(1, 9))
    for batch in Loader(view, batch_size=8, image=ImageField(size=(32, 64))):
        pixels = ((batch.images.numpy() + 1) * 127.5).round().astype(np.uint8).transpose(0, 2, 3, 1)
        for picture in pixels:
            np.testing.assert_array_equal(picture, upright)


@pytest.mark.parametrize(
    "payload",
    [
        EXIF_HEAD,
        EXIF_HEAD + bytes(range(1, 15)),
        EXIF_HEAD + b"II*\0\x08\0\0\0" + b"\xff" * 20,
        EXIF_HEAD + b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x63\0\0\0\0\0\0",
        b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta \xa8\xff></x:xmpmeta>",
    ],
    ids=["empty", "junk", "junk-ifd", "orientation-99", "xmp-not-utf8"],
)
def test_img_02_broken_exif_keeps_the_pixels(payload: bytes) -> None:
    jpeg = encode(Image.fromarray(gradient()), "JPEG", quality=95)
    pixels, facts = decode_image_with_facts(insert_app1(jpeg, payload))
    np.testing.assert_array_equal(pixels, decode_image(jpeg))
    assert facts.exif_orientation == 1


def test_img_02_doubled_prefix_keeps_the_pixels() -> None:
    jpeg = encode(Image.fromarray(gradient()), "JPEG", quality=95)
    pixels, facts = decode_image_with_facts(insert_app1(jpeg, EXIF_HEAD + exif(6)))
    assert pixels.shape in {(32, 64, 3), (64, 32, 3)}
    assert facts.exif_orientation in {1, 6}


def test_img_02_broken_exif_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    jpeg = encode(Image.fromarray(gradient()), "JPEG")
    (folder / "a.jpg").write_bytes(
        insert_app1(jpeg, EXIF_HEAD + b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0")
    )
    (folder / "a.txt").write_text("a gradient")
    report = ingest(folder, tmp_path / "store")
    assert report.num_added == 1
    assert report.notes == {"broken_exif": 1}


def test_img_03_cmyk_jpeg_has_the_colours_of_its_source(tmp_path: Path) -> None:
    source = gradient()
    jpeg = encode(Image.fromarray(source).convert("CMYK"), "JPEG", quality=98, subsampling=0)
    marker = jpeg.index(b"\xff\xee")
    length = int.from_bytes(jpeg[marker + 2 : marker + 4], "big")
    without_marker = jpeg[:marker] + jpeg[marker + 2 + length :]
    for data in (jpeg, without_marker):
        pixels, facts = decode_image_with_facts(data)
        assert_close(pixels, source, 3)
        assert facts.mode == "CMYK"
    tiff = encode(Image.fromarray(source).convert("CMYK"), "TIFF")
    assert_close(decode_image(tiff), source, 1)


def test_img_03_embedded_profile_is_applied() -> None:
    from PIL import ImageCms

    source = Image.fromarray(gradient())
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    plain = encode(source, "PNG", icc_profile=lab.tobytes())
    np.testing.assert_array_equal(decode_image(plain), gradient())
    pixels, facts = decode_image_with_facts(encode(source, "PNG", icc_profile=b"not a profile at all" * 10))
    np.testing.assert_array_equal(pixels, gradient())
    assert facts.notes == ("broken_profile",)


def test_img_06_transparency_is_composited_on_white() -> None:
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[2:6, 2:6] = (200, 30, 30, 255)
    rgba[0, 0] = (0, 0, 0, 128)
    picture = Image.fromarray(rgba)
    palette = picture.quantize(4)
    grey_alpha = Image.merge("LA", [Image.new("L", (8, 8), 0), Image.fromarray(rgba[:, :, 3])])
    colour_key = Image.fromarray(np.where(rgba[:, :, 3:] == 255, rgba[:, :, :3], (1, 2, 3)).astype(np.uint8))
    files = {
        "RGBA": encode(picture, "PNG"),
        "P": encode(palette, "PNG"),
        "LA": encode(grey_alpha, "PNG"),
        "RGB": encode(colour_key, "PNG", transparency=(1, 2, 3)),
        "L": encode(Image.new("L", (8, 8), 7), "PNG", transparency=7),
        "webp": encode(picture, "WEBP", lossless=True, exact=True),
        "gif": encode(picture, "GIF"),
    }
    for name, data in files.items():
        pixels, facts = decode_image_with_facts(data)
        assert facts.had_alpha, name
        assert (pixels[7, 7] == 255).all(), name
    np.testing.assert_array_equal(decode_image(files["RGBA"])[3, 3], [200, 30, 30])
    np.testing.assert_array_equal(decode_image(files["RGBA"])[0, 0], [127, 127, 127])
    np.testing.assert_array_equal(decode_image(files["LA"])[3, 3], [0, 0, 0])
    np.testing.assert_array_equal(decode_image(files["RGBA"], background=(0, 9, 0))[7, 7], [0, 9, 0])
    assert not decode_image_with_facts(encode(Image.new("RGB", (4, 4)), "PNG"))[1].had_alpha


def test_img_07_every_mode_becomes_rgb() -> None:
    grey = (np.arange(81).reshape(9, 9) * 3).astype(np.uint8)
    rgb = np.stack([grey, grey[::-1], grey[:, ::-1]], -1)
    colour = Image.fromarray(rgb)
    wide = Image.fromarray(grey.astype(np.uint16) * 257)
    wanted_grey = np.repeat(grey[:, :, None], 3, 2)
    cases: list[tuple[str, str, Image.Image, np.ndarray, float]] = [
        (
            "1",
            "PNG",
            Image.fromarray(grey).convert("1", dither=Image.Dither.NONE),
            np.where(wanted_grey > 127, 255, 0),
            0,
        ),
        ("L", "PNG", Image.fromarray(grey), wanted_grey, 0),
        ("LA", "PNG", Image.fromarray(grey).convert("LA"), wanted_grey, 0),
        ("P", "PNG", colour.quantize(256), rgb, 12),
        ("RGB", "PNG", colour, rgb, 0),
        ("RGBA", "PNG", colour.convert("RGBA"), rgb, 0),
        ("CMYK", "TIFF", colour.convert("CMYK"), rgb, 1),
        ("YCbCr", "TIFF", colour.convert("YCbCr"), rgb, 2),
        ("LAB", "TIFF", _to_lab(colour), rgb, 4),
        ("I;16", "PNG", wide, wanted_grey, 0),
        ("I;16", "TIFF", wide, wanted_grey, 0),
        ("I;16B", "TIFF", wide.convert("I").convert("I;16B"), wanted_grey, 0),
        ("I", "TIFF", wide.convert("I"), wanted_grey, 0),
        ("I", "TIFF", Image.fromarray(grey).convert("I"), wanted_grey, 0),
        ("F", "TIFF", Image.fromarray(grey).convert("F"), wanted_grey, 0),
        ("F", "TIFF", Image.fromarray(grey.astype(np.float32) / 255), wanted_grey, 0),
    ]
    for mode, format, picture, wanted, levels in cases:
        pixels, facts = decode_image_with_facts(encode(picture, format))
        assert pixels.dtype == np.uint8 and pixels.flags.writeable, mode
        assert facts.mode.startswith(mode[:4]) or mode == "YCbCr", (mode, facts.mode)
        assert_close(pixels, wanted, levels)


def _to_lab(picture: Image.Image) -> Image.Image:
    from PIL import ImageCms

    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    return ImageCms.applyTransform(picture, ImageCms.buildTransform(srgb, lab, "RGB", "LAB"))


def test_img_07_palette_with_alpha_and_premultiplied_modes() -> None:
    from datapipe.decode.colour import to_rgb

    colour = Image.fromarray(gradient(9, 9))
    for mode in ("PA", "La", "RGBa", "RGBX", "HSV"):
        source = (
            colour.convert("LA") if mode == "La" else colour.convert("RGBA") if mode == "RGBa" else colour
        )
        converted, _ = to_rgb(_as_mode(source, mode), background=(255, 255, 255))
        assert (converted.mode, converted.size) == ("RGB", (9, 9)), mode


def _as_mode(picture: Image.Image, mode: str) -> Image.Image:
    return picture.convert("P").convert("PA") if mode == "PA" else picture.convert(mode)


def _raw_png(samples: np.ndarray, depth: int, colour_type: int) -> bytes:
    """A PNG of any bit depth, from samples (H, W, channels) in the range of that depth."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = samples.shape[:2]
    flat = samples.reshape(height, -1)
    if depth == 16:
        rows = [row.astype(">u2").tobytes() for row in flat]
    else:
        bits = (flat[:, :, None] >> np.arange(depth)[::-1]) & 1
        rows = [np.packbits(row.ravel().astype(np.uint8)).tobytes() for row in bits]
    head = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _raw_tiff(samples: np.ndarray, photometric: int) -> bytes:
    """An uncompressed little-endian TIFF of 16 bits a sample."""
    height, width, channels = samples.shape
    data = samples.astype("<u2").tobytes()
    bits_at = 8 + 2 + 12 * 9 + 4
    entries = [
        (256, 3, 1, width),
        (257, 3, 1, height),
        (258, 3, channels, bits_at),
        (259, 3, 1, 1),
        (262, 3, 1, photometric),
        (273, 4, 1, bits_at + 2 * channels),
        (277, 3, 1, channels),
        (278, 3, 1, height),
        (279, 4, 1, len(data)),
    ]
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    head = b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + struct.pack("<I", 0)
    return head + struct.pack(f"<{channels}H", *[16] * channels) + data


def _alpha_bmp(rgb: np.ndarray, alpha: np.ndarray) -> bytes:
    """A BMP with a version 4 header, which is the one with an alpha mask."""
    height, width = alpha.shape
    body = np.dstack([rgb[::-1, :, ::-1], alpha[::-1]]).astype(np.uint8).tobytes()
    masks = struct.pack("<4I4s", 0xFF0000, 0xFF00, 0xFF, 0xFF000000, b"BGRs") + bytes(48)
    head = struct.pack("<IiiHHIIiiII", 108, width, height, 1, 32, 3, len(body), 2835, 2835, 0, 0)
    return struct.pack("<2sIHHI", b"BM", 122 + len(body), 0, 0, 122) + head + masks + body


def test_img_07_other_depths_and_containers() -> None:
    """16 bits in colour and with alpha, fewer than 8, alpha in BMP, ICO and JPEG 2000."""
    rgb = gradient(16, 16)
    wide = rgb.astype(np.uint16) * 257
    alpha = np.where(np.arange(256).reshape(16, 16) < 128, 0, 255).astype(np.uint8)
    over_white = np.where(alpha[:, :, None] > 0, rgb, 255)
    grey = np.arange(16).reshape(4, 4)
    files: dict[str, tuple[bytes, np.ndarray, float, bool]] = {
        "PNG, RGB of 16 bits": (_raw_png(wide, 16, 2), rgb, 0, False),
        "PNG, RGBA of 16 bits": (
            _raw_png(np.dstack([wide, alpha.astype(np.uint16) * 257]), 16, 6), over_white, 0, True,
        ),
        "PNG, grey and alpha of 16 bits": (
            _raw_png(np.dstack([wide[:, :, 0], alpha.astype(np.uint16) * 257]), 16, 4),
            np.where(alpha[:, :, None] > 0, rgb[:, :, :1].repeat(3, 2), 255), 0, True,
        ),
        "PNG, grey of 4 bits": (
            _raw_png(grey[:, :, None], 4, 0), (grey * 17)[:, :, None].repeat(3, 2), 0, False,
        ),
        "PNG, grey of 2 bits": (
            _raw_png((grey % 4)[:, :, None], 2, 0), (grey % 4 * 85)[:, :, None].repeat(3, 2), 0, False,
        ),
        "TIFF, RGB of 16 bits": (_raw_tiff(wide, 2), rgb, 0, False),
        "TIFF, CMYK of 16 bits": (
            _raw_tiff(np.dstack([65535 - wide, np.zeros((16, 16), np.uint16)]), 5), rgb, 1, False,
        ),
        "BMP with alpha": (_alpha_bmp(rgb, alpha), over_white, 0, True),
        "ICO with alpha": (encode(Image.fromarray(np.dstack([rgb, alpha])), "ICO"), over_white, 0, True),
        "JPEG 2000 with alpha": (
            encode(Image.fromarray(np.dstack([rgb, alpha])), "JPEG2000"), over_white, 0, True,
        ),
        "JPEG 2000, grey of 16 bits": (
            encode(Image.fromarray(wide[:, :, 0]), "JPEG2000"), rgb[:, :, :1].repeat(3, 2), 0, False,
        ),
    }  # fmt: skip
    for name, (data, wanted, levels, had_alpha) in files.items():
        pixels, facts = decode_image_with_facts(data)
        assert facts.had_alpha is had_alpha, name
        assert pixels.shape == wanted.shape, name
        assert np.abs(pixels.astype(int) - wanted).mean() <= levels, name


@pytest.mark.parametrize("size", [(1, 3), (3, 1), (1, 1)])
@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "I;16"])
def test_img_07_tiny_pictures_keep_the_channel_axis_last(size: tuple[int, int], mode: str) -> None:
    pixels = decode_image(encode(Image.new(mode, size), "PNG"))
    assert pixels.shape == (size[1], size[0], 3)


def _noise_jpeg(**options: object) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    return encode(Image.fromarray(noise), "JPEG", **options)


def test_img_08_cut_pictures_are_quarantined(tmp_path: Path) -> None:
    whole, progressive = _noise_jpeg(), _noise_jpeg(progressive=True)
    png = encode(Image.fromarray(gradient()), "PNG")
    webp = encode(Image.fromarray(gradient()), "WEBP")
    cuts = {
        "half.jpg": whole[: len(whole) // 2],
        "end.jpg": whole[:-2],
        "progressive.jpg": progressive[: len(progressive) * 8 // 10],
        "head.jpg": whole[:100],
        "half.png": png[: len(png) // 2],
        "half.webp": webp[: len(webp) // 2],
    }
    folder = tmp_path / "crawl"
    folder.mkdir()
    for name, data in {**cuts, "good.jpg": whole}.items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text("noise")
    (folder / "half.caption").write_text("noise")
    with pytest.raises(BadFractionError) as caught:
        ingest(folder, tmp_path / "store", key_prefix="c")
    report = caught.value.report
    assert report.num_added == 1
    assert report.reasons == {"truncated": 6}
    refused = FeatureStore.open(tmp_path / "store").quarantined().to_pylist()
    assert {Path(row["place"]).name for row in refused} == set(cuts)
    assert all(row["reason"].startswith("truncated: ") for row in refused)
    assert {row["place"]: row["data"] for row in refused}[str(folder / "half.jpg")] == cuts["half.jpg"]


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 8}])
def test_img_08_damage_in_the_middle_is_noticed(options: dict[str, int], tmp_path: Path) -> None:
    """A JPEG with its end but without a piece of its middle: Pillow shows half a picture and says nothing."""
    whole = _noise_jpeg(**options)
    middle = len(whole) // 2
    folder = tmp_path / "crawl"
    folder.mkdir()
    for name, data in {"hole": whole[:middle] + whole[middle + 900 :], "whole": whole}.items():
        (folder / f"{name}.jpg").write_bytes(data)
        (folder / f"{name}.txt").write_text("noise")
    Image.open(folder / "hole.jpg").load()
    with pytest.raises(BadFractionError) as caught:
        ingest(folder, tmp_path / "store")
    assert caught.value.report.reasons == {"corrupt": 1} and caught.value.report.num_added == 1


def test_img_09_the_switch_that_fills_cut_pictures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ValueError, match="LOAD_TRUNCATED_IMAGES is on"):
        decode_image(_noise_jpeg())


def _bomb_png(side: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compressobj(9)
    body = b"".join(rows.compress(b"\0" * (side // 8 + 1)) for _ in range(side)) + rows.flush()
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_img_10_pixel_budget_is_read_from_the_header() -> None:
    bomb = _bomb_png(20000)
    assert len(bomb) < 60_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DecodeError, match="400000000 pixels") as caught:
        decode_image(bomb)
    assert caught.value.reason == "too_many_pixels"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    with pytest.raises(DecodeError, match="the budget is 100;"):
        decode_image(encode(Image.new("RGB", (20, 20)), "PNG"), max_pixels=100)
    assert decode_image(encode(Image.new("RGB", (20, 20)), "PNG"), max_pixels=400).shape == (20, 20, 3)


def test_img_12_content_counts_not_the_name(tmp_path: Path) -> None:
    folder = tmp_path / "crawl"
    folder.mkdir()
    files = {
        "x.jpg": encode(Image.fromarray(gradient()), "WEBP", lossless=True),
        "y.jpg": b"<!DOCTYPE html><html><body>404</body></html>",
        "z.png": b"",
        "j.png": b'{"error": "not found"}',
        "h.jpg": b"\0\0\0\x18ftypheic\0\0\0\0heicmif1" + b"\0" * 40,
        "n.jpg": b"\0" * 500,
        "t.jpg": b"hello",
        "p.jpg": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        "v.jpg": b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + b"\0" * 40,
        "s.png": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text("something")
    (folder / "a.jpg").mkdir()
    with pytest.raises(BadFractionError) as caught:
        ingest(folder, tmp_path / "store")
    report = caught.value.report
    assert report.reasons == {
        **dict.fromkeys(
            [
                *("html", "empty", "json", "missing_codec", "lfs_pointer", "no_moov", "svg", "not_a_file"),
                *("text", "not_an_image"),
            ],
            1,
        ),
    }
    assert "pillow-heif" in report.examples["missing_codec"][0].detail
    assert FeatureStore.open(tmp_path / "store").select().column("format").to_pylist() == ["webp"]


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_img_13_first_frame_of_many(format: str) -> None:
    frames = [Image.new("RGB", (10, 6), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
    pixels, facts = decode_image_with_facts(data)
    assert facts.n_frames == 3
    np.testing.assert_array_equal(pixels, np.broadcast_to(np.uint8([255, 0, 0]), (6, 10, 3)))


@pytest.mark.parametrize(("policy", "keys"), [("first", ["a"]), ("all", ["a/frame-00000", "a/frame-00001"])])
def test_img_13_policy_stands_in_the_index(policy: str, keys: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    frames = [Image.new("RGB", (10, 6), colour) for colour in ("red", "lime")]
    (folder / "a.gif").write_bytes(encode(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    (folder / "a.txt").write_text("two colours")
    ingest(folder, tmp_path / "store", frames=policy)  # type: ignore[arg-type]
    view = FeatureStore.open(tmp_path / "store").select()
    assert view.keys() == keys
    assert view.column("n_frames").to_pylist() == [2] * len(keys)
    assert view.column("frame").to_pylist() == list(range(len(keys)))
    with pytest.raises(BadFractionError, match="1 multi_frame"):
        ingest(folder, tmp_path / "none", frames="skip")


def test_img_14_a_second_picture_that_is_cut_costs_nothing() -> None:
    frames = [Image.fromarray(gradient(64, 64)), Image.new("RGB", (64, 64), "blue")]
    data = encode(frames[0], "MPO", save_all=True, append_images=frames[1:], quality=95)
    pixels, facts = decode_image_with_facts(data[:-100])
    assert facts.format == "jpeg"
    assert_close(pixels, gradient(64, 64), 2)


def test_img_14_mpo_is_a_jpeg() -> None:
    upright = gradient(64, 64)
    frames = [Image.fromarray(stored_for(upright, 6)), Image.new("RGB", (64, 64), "blue")]
    data = encode(frames[0], "MPO", save_all=True, append_images=frames[1:], exif=exif(6), quality=95)
    pixels, facts = decode_image_with_facts(data)
    assert (facts.format, facts.n_frames, facts.exif_orientation) == ("jpeg", 2, 6)
    assert_close(pixels, upright, 2)


def test_img_15_few_file_descriptors_are_enough(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    data = encode(Image.new("RGB", (4, 4)), "PNG")
    for index in range(500):
        (folder / f"{index}.png").write_bytes(data)
        (folder / f"{index}.txt").write_text(f"number {index}")
    script = textwrap.dedent(
        """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        from datapipe import ImageField, Loader, ingest
        from storage import FeatureStore
        report = ingest(sys.argv[1], sys.argv[2], workers=2)
        view = FeatureStore.open(sys.argv[2]).select()
        loader = Loader(view, batch_size=50, image=ImageField(size=(4, 4)))
        print(report.num_added, sum(len(batch) for _ in range(2) for batch in loader))
        """
    )
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "store")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["500", "1000"]
