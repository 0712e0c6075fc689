"""A thousand files of every kind with seventy defects: exactly the expected rows, reasons and pixels."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datapipe import BadFractionError, ImageField, Loader, ingest
from storage import FeatureStore

SIZE = (24, 32)
Defect = tuple[str, bytes, str, bytes | None]  # file name, content, reason, caption file


def pixels(index: int) -> np.ndarray:
    """Four flat quarters, so that lossy formats keep them, and no two pictures are alike."""
    colours = np.random.default_rng(index).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return colours.repeat(SIZE[0] // 2, 0).repeat(SIZE[1] // 2, 1)


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def oriented(index: int, orientation: int) -> bytes:
    undo: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        3: lambda a: a[::-1, ::-1],
        6: lambda a: np.rot90(a, 1),
        8: lambda a: np.rot90(a, -1),
    }
    tags = Image.Exif()
    tags[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(undo[orientation](pixels(index))))
    return encode(stored, "JPEG", quality=98, subsampling=0, exif=tags)


def transparent(index: int) -> bytes:
    rgba = np.dstack([pixels(index), np.full(SIZE, 255, np.uint8)])
    return encode(Image.fromarray(rgba), "PNG")


# name suffix, how it is written, grey levels that the mean may be off
WRITERS: list[tuple[str, Callable[[int], bytes], float]] = [
    ("png", lambda i: encode(Image.fromarray(pixels(i)), "PNG"), 0),
    ("jpg", lambda i: encode(Image.fromarray(pixels(i)), "JPEG", quality=98, subsampling=0), 2),
    (
        "jpeg",
        lambda i: encode(Image.fromarray(pixels(i)), "JPEG", quality=98, subsampling=0, progressive=True),
        2,
    ),
    ("webp", lambda i: encode(Image.fromarray(pixels(i)), "WEBP", lossless=True), 0),
    ("bmp", lambda i: encode(Image.fromarray(pixels(i)), "BMP"), 0),
    ("tif", lambda i: encode(Image.fromarray(pixels(i)), "TIFF", compression="tiff_lzw"), 0),
    ("gif", lambda i: encode(Image.fromarray(pixels(i)).quantize(8), "GIF"), 6),
    ("PNG", transparent, 0),
    ("JPG", lambda i: oriented(i, 3), 2),
    ("jpe", lambda i: oriented(i, 6), 2),
    ("jfif", lambda i: oriented(i, 8), 2),
    ("tiff", lambda i: encode(Image.fromarray(pixels(i)).convert("CMYK"), "TIFF"), 1),
    ("jp2", lambda i: encode(Image.fromarray(pixels(i)), "JPEG2000"), 0),
    ("ppm", lambda i: encode(Image.fromarray(pixels(i)), "PPM"), 0),
    ("avif", lambda i: encode(Image.fromarray(pixels(i)), "AVIF", quality=100, subsampling="4:4:4"), 3),
    ("mpo", lambda i: encode(Image.fromarray(pixels(i)), "MPO", quality=98, subsampling=0), 2),
]


def bomb() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def without_middle(jpeg: bytes) -> bytes:
    """Not cut at its end: libjpeg fills the hole and says so nowhere in Pillow."""
    return jpeg[: len(jpeg) // 2] + jpeg[len(jpeg) // 2 + 400 :]


def with_frame(jpeg: bytes, marker: int, precision: int) -> bytes:
    """A JPEG that claims another coding process."""
    at = jpeg.index(b"\xff\xc0")
    return jpeg[: at + 1] + bytes([marker]) + jpeg[at + 2 : at + 4] + bytes([precision]) + jpeg[at + 5 :]


def damaged(data: bytes, at: float = 0.6) -> bytes:
    return (
        data[: int(len(data) * at)]
        + bytes([data[int(len(data) * at)] ^ 0x55])
        + data[int(len(data) * at) + 1 :]
    )


def without_palette() -> bytes:
    """A PNG of palette colours from which the palette was cut."""
    data = encode(Image.fromarray(pixels(5)).quantize(16), "PNG")
    start = data.index(b"PLTE") - 4
    return data[:start] + data[start + 12 + int.from_bytes(data[start : start + 4], "big") :]


def defects() -> list[Defect]:
    png, jpg = WRITERS[0][1](9001), WRITERS[1][1](9002)
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noisy = {
        format: encode(noise, format)
        for format in ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "AVIF", "JPEG2000")
    }
    ok = b"a caption"
    found: list[Defect] = [
        *(
            (f"cut{i}.jpg", noisy["JPEG"][: len(noisy["JPEG"]) * i // 10], "truncated", ok)
            for i in (1, 3, 5, 8)
        ),
        ("noeoi.jpg", noisy["JPEG"][:-2], "truncated", ok),
        *((f"cut{i}.png", noisy["PNG"][: len(noisy["PNG"]) * i // 10], "truncated", ok) for i in (1, 5, 9)),
        ("cut.webp", noisy["WEBP"][:300], "truncated", ok),
        ("cut.bmp", noisy["BMP"][:3000], "truncated", ok),
        ("cut.gif", noisy["GIF"][:1500], "truncated", ok),
        ("flip.png", damaged(noisy["PNG"]), "corrupt", ok),
        ("ihdr.png", png[:20] + b"\xff" + png[21:], "corrupt", ok),
        ("zero.png", b"", "empty", ok),
        ("zero.jpg", b"", "empty", ok),
        ("page.jpg", b"<!DOCTYPE html><html>404</html>", "html", ok),
        ("page.png", b"\n\n<html><body>moved</body></html>", "html", ok),
        ("api.jpg", b'{"error": "gone"}', "json", ok),
        ("drawing.png", b"<?xml version='1.0'?><svg></svg>", "svg", ok),
        ("paper.jpg", b"%PDF-1.4 ....", "pdf", ok),
        ("zip.jpg", b"PK\x03\x04....", "archive", ok),
        ("gz.png", b"\x1f\x8b\x08....", "archive", ok),
        ("psd.tif", b"8BPS\0\x01....", "unsupported_format", ok),
        ("eps.tif", b"%!PS-Adobe-3.0 EPSF", "unsupported_format", ok),
        ("movie.gif", b"\0\0\0\x18ftypmp42\0\0\0\0isom", "no_moov", ok),
        ("webm.webp", b"\x1a\x45\xdf\xa3....", "corrupt", ok),
        ("lfs.png", b"version https://git-lfs.github.com/spec/v1\n", "lfs_pointer", ok),
        ("phone.jpg", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 40, "missing_codec", ok),
        ("nulls.jpg", b"\0" * 4096, "not_an_image", ok),
        ("text.jpg", b"just some words", "text", ok),
        ("denied.jpg", b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "xml", ok),
        ("login.jpg", b"<script>location='/login'</script>", "html", ok),
        ("wide.png", "\ufeff<!DOCTYPE html>".encode("utf-16-le"), "html", ok),
        ("rar.png", b"Rar!\x1a\x07\0....", "archive", ok),
        ("xl.jpg", b"\xff\x0a\xfa\x1f....", "unsupported_format", ok),
        ("lines.png", png.replace(b"\r\n", b"\n"), "corrupt", ok),
        ("colours.png", without_palette(), "corrupt", ok),
        ("directory.tif", noisy["TIFF"][:40], "truncated", ok),
        ("noise.jpg", np.random.default_rng(3).bytes(500), "not_an_image", ok),
        ("bomb.png", bomb(), "too_many_pixels", ok),
        ("hole.jpg", without_middle(noisy["JPEG"]), "corrupt", ok),
        ("wide.jpg", with_frame(jpg, 0xC1, 12), "unsupported_format", ok),
        ("exact.jpg", with_frame(jpg, 0xC3, 8), "unsupported_format", ok),
        ("cut.tif", noisy["TIFF"][:5000], "truncated", ok),
        ("cut.avif", noisy["AVIF"][: len(noisy["AVIF"]) // 2], "truncated", ok),
        ("cut.jp2", noisy["JPEG2000"][: len(noisy["JPEG2000"]) // 3], "truncated", ok),
        ("song.jpg", b"ID3\x04\0\0\0\0\0\0" + b"\xff\xfb\x90\0" * 100, "no_video_stream", ok),
        ("wave.png", b"RIFF$\0\0\0WAVEfmt \x10\0\0\0", "no_video_stream", ok),
        ("silent.png", png, "caption_missing", None),
        ("silent.jpg", jpg, "caption_missing", None),
        ("blank.png", png, "caption_empty", b""),
        ("spaces.png", png, "caption_empty", b" \n\t\n"),
        ("invisible.png", png, "caption_empty", "\u200b\ufeff".encode()),
        ("latin.png", png, "not_utf8", "café".encode("latin-1")),
        ("utf16.png", png, "not_utf8", "caption".encode("utf-16")),
        ("nul.png", png, "nul_byte", b"x\0y"),
    ]
    values: list[tuple[str, object, str]] = [
        ("null", None, "caption_none"),
        ("number", 3.5, "caption_number"),
        ("list", ["a"], "caption_list"),
        ("dict", {"en": "a"}, "caption_dict"),
        ("bool", True, "caption_bool"),
        ("nan", float("nan"), "caption_nan"),
        ("surrogate", "\ud800", "not_utf8"),
    ]
    for name, value, reason in values:
        found.append(
            (
                f"{name}.bmp",
                encode(Image.fromarray(pixels(1)), "BMP"),
                reason,
                json.dumps({"caption": value}).encode(),
            )
        )
    found.append(("broken.bmp", png, "bad_json", b"{"))
    found.append(("twice.bmp", png, "repeated_key", b'{"caption": "a", "caption": "b"}'))
    return found


def write(folder: Path) -> tuple[dict[str, tuple[int, float]], dict[str, str]]:
    """Write the folder; return the good keys with index and tolerance, and place -> reason."""
    good: dict[str, tuple[int, float]] = {}
    for index in range(460):
        suffix, writer, levels = WRITERS[index % len(WRITERS)]
        stem = f"part{index % 7}/deep/{index:04d}" if index % 3 else f"{index:04d}"
        path = folder / f"{stem}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(writer(index))
        path.with_suffix(".txt").write_text(f"picture {index} ü 日本\n")
        good[stem] = (index, levels)
    places: dict[str, str] = {}
    for name, content, reason, caption in defects():
        path = folder / "bad" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        stem = f"bad/{name}".rsplit(".", 1)[0]
        if caption is not None:
            suffix = ".json" if caption[:1] == b"{" else ".txt"
            (folder / f"{stem}{suffix}").write_bytes(caption)
        places[f"bad/{name}"] = reason
    return good, places


def add_odd_entries(folder: Path, places: dict[str, str]) -> None:
    """Entries that are no ordinary files, captions alone, and pictures that share a key."""
    odd = folder / "odd"
    odd.mkdir()
    (odd / "folder.jpg").mkdir()
    os.mkfifo(odd / "pipe.jpg")
    (odd / "dead.png").symlink_to(odd / "nowhere.png")
    (folder.parent / "secret.png").write_bytes(WRITERS[0][1](1))
    (odd / "out.png").symlink_to(folder.parent / "secret.png")
    for name in ("lonely.txt", "lonely2.caption"):
        (odd / name).write_text("a caption without a picture")
    for suffix in ("gif", "png"):
        (odd / f"same.{suffix}").write_bytes(WRITERS[0][1](9100))
    (odd / "same.txt").write_text("two pictures of one name")
    (odd / "split.png").write_bytes(WRITERS[0][1](9101))
    (odd / "split.txt").write_text("one")
    (odd / "split.caption").write_text("two")
    described = folder / "described"
    described.mkdir()
    for name in ("good.png", "unnamed.png"):
        (described / name).write_bytes(WRITERS[0][1](9200 + len(name)))
    lines = [
        "file_name,caption",
        "good.png,a described picture",
        ",no name",
        "gone.png,no file",
        "../../secret.png,outside",
        "good.png,a,b,c",
        "/etc/hostname,absolute",
    ]
    (described / "metadata.csv").write_text("\n".join(lines) + "\n")
    places |= {
        **{"described/metadata.csv:3": "row_without_image", "described/metadata.csv:4": "row_without_image"},
        **{"described/metadata.csv:5": "path_outside_folder", "described/metadata.csv:6": "ragged_row"},
        **{"described/metadata.csv:7": "path_outside_folder", "described/unnamed.png": "image_without_row"},
        **{"odd/folder.jpg": "not_a_file", "odd/pipe.jpg": "not_a_file", "odd/dead.png": "not_a_file"},
        **{"odd/out.png": "path_outside_folder", "odd/lonely.txt": "caption_without_image"},
        **{"odd/lonely2.caption": "caption_without_image", "odd/same.png": "duplicate_key"},
        **{"odd/split.png": "two_captions"},
    }


def add_tables(folder: Path, places: dict[str, str]) -> None:
    """Rows that no folder of captions has: conversations, pairs, keys and URLs."""
    told = folder / "told"
    told.mkdir()
    (told / "a.png").write_bytes(WRITERS[0][1](9300))
    ask = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a cat"}]
    rows: list[tuple[dict[str, object], str]] = [
        ({"file_name": "http://host/a.png"}, "remote_url"),
        ({"messages": []}, "messages_empty"),
        ({"messages": "no list"}, "bad_messages"),
        ({"messages": ask}, "image_count"),
        ({"messages": [{"role": "alien", "content": "<image>"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": ""}]}, "message_empty"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "identical_pair"),
        ({"prompt": "p", "chosen": "a", "rejected": ask}, "mixed_pair"),
        ({"chosen": "a", "rejected": "b"}, "prompt_missing"),
        ({"prompt": "p", "chosen": None, "rejected": "b"}, "chosen_none"),
        ({"key": 1.5, "caption": "c"}, "key_number"),
        ({"file_name": 7, "caption": "c"}, "image_other_type"),
    ]
    lines = [json.dumps({"file_name": "a.png", **row}) for row, _ in rows]
    (told / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    places |= {f"told/metadata.jsonl:{number}": reason for number, (_, reason) in enumerate(rows, 1)}
    cut = folder / "cut"
    cut.mkdir()
    (cut / "metadata.csv").write_text('file_name,caption\na.png,"no end\n')
    places["cut/metadata.csv:2"] = "bad_csv"


@pytest.mark.slow
def test_exactly_the_expected_rows_reasons_and_pixels(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    good, places = write(folder)
    add_odd_entries(folder, places)
    add_tables(folder, places)
    assert sum(1 for path in folder.rglob("*") if not path.is_dir()) > 1000
    assert len(places) >= 90 and len(set(places.values())) >= 40
    with pytest.raises(BadFractionError) as caught:
        ingest(folder, tmp_path / "store", workers=2, commit_rows=100)
    report = caught.value.report
    store = FeatureStore.open(tmp_path / "store")
    refused = {row["place"]: row["reason"].partition(":")[0] for row in store.quarantined().to_pylist()}
    assert refused == {f"{folder}/{place}": reason for place, reason in places.items()}
    assert dict(report.reasons) == dict(Counter(places.values()))
    view = store.select()
    assert sorted(view.keys()) == sorted([*good, "odd/same", "described/good"])
    assert report.num_reoriented == sum(index % len(WRITERS) in (8, 9, 10) for index in range(460))
    for batch in Loader(view, batch_size=32, image=ImageField(size=SIZE), drop_last=False):
        found = ((batch.images.numpy() + 1) * 127.5).round().transpose(0, 2, 3, 1)
        for key, picture, caption in zip(batch.keys, found, batch.columns["caption"]):
            if key in ("odd/same", "described/good"):
                continue
            index, levels = good[key]
            assert caption == f"picture {index} ü 日本"
            assert np.abs(picture - pixels(index)).mean() <= levels, key
    assert ingest(folder, tmp_path / "store", max_bad_fraction=1).num_added == 0
    assert store.refresh().quarantined().num_rows == len(places)
