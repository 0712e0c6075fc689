"""Tell what bytes are by their content. File names are not trusted."""

from __future__ import annotations

from datapipe.errors import DecodeError

__all__ = ["AVIF_BRANDS", "HEIC_BRANDS", "sniff_image_format"]

_HEAD_BYTES = 64

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"BM", "BMP"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG2000"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"qoif", "QOI"),
    (b"DDS ", "DDS"),
)

_NOT_PICTURES: tuple[tuple[bytes, str, str], ...] = (
    (b"%PDF", "pdf", "a PDF document; render its pages to images first"),
    (b"PK\x03\x04", "archive", "a zip archive; unpack it first"),
    (b"\x1f\x8b", "archive", "gzip data; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "archive", "a 7z archive; unpack it first"),
    (b"8BPS", "unsupported_format", "a Photoshop document; export it as PNG"),
    (b"%!PS", "unsupported_format", "PostScript; render it to PNG first"),
    (b"\x1a\x45\xdf\xa3", "video", "a Matroska or WebM video"),
    (b"version https://git-lfs", "lfs_pointer", "a Git LFS pointer; run `git lfs pull` first"),
)

AVIF_BRANDS = frozenset({b"avif", b"avis"})
HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})


def sniff_image_format(data: bytes | memoryview) -> str:
    """Name the image format, in Pillow's spelling, from the first bytes.

    Args:
        data: The whole file; only its head is read, except to tell JSON from other text.

    Returns:
        `JPEG`, `PNG`, `WEBP`, `GIF`, `TIFF`, `BMP`, `AVIF`, `HEIF`, `JPEG2000`, `PPM`, `ICO`, `QOI` or `DDS`.

    Raises:
        DecodeError: Reasons `empty`, `html`, `json`, `svg`, `pdf`, `archive`, `video`, `lfs_pointer`,
            `unsupported_format`, `not_an_image`.
    """
    if len(data) == 0:
        raise DecodeError("empty", "the file has 0 bytes")
    head = bytes(data[:_HEAD_BYTES])
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if len(head) > 2 and head[:1] == b"P" and head[1:2] in b"123456f" and head[2:3].isspace():
        return "PPM"
    if head[4:8] == b"ftyp":
        return _sniff_iso_media(head)
    for magic, reason, detail in _NOT_PICTURES:
        if head.startswith(magic):
            raise DecodeError(reason, detail)
    raise _text_or_unknown(bytes(data[:512]), len(data))


def _sniff_iso_media(head: bytes) -> str:
    # The major brand may be generic (mif1), so that the compatible brands decide.
    size = int.from_bytes(head[:4], "big")
    listed = head[16 : min(max(size, 16), len(head))]
    brands = {head[8:12]} | {listed[i : i + 4] for i in range(0, len(listed) - 3, 4)}
    if brands & AVIF_BRANDS:
        return "AVIF"
    if brands & HEIC_BRANDS:
        return "HEIF"
    raise DecodeError("video", f"an MP4-like video with brand {head[8:12].decode('latin-1')!r}")


def _text_or_unknown(start: bytes, size: int) -> DecodeError:
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) or b"<html" in text[:256]:
        return DecodeError("html", "a web page was saved in place of the picture; download it again")
    if text.startswith((b"<svg", b"<?xml")):
        return DecodeError("svg", "a vector drawing or XML; render it to PNG first")
    if text.startswith((b"{", b"[")) and text.isascii():
        return DecodeError("json", "a JSON answer was saved in place of the picture; download it again")
    if not any(start):
        return DecodeError("not_an_image", f"the first {len(start)} of {size} bytes are all zero")
    return DecodeError("not_an_image", f"no known image starts with {start[:8].hex(' ')}")
