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
    (b"Rar!\x1a\x07", "archive", "a RAR archive; unpack it first"),
    (b"\xfd7zXZ\x00", "archive", "xz data; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "archive", "zstd data; unpack it first"),
    (b"BZh", "archive", "bzip2 data; unpack it first"),
    (b"8BPS", "unsupported_format", "a Photoshop document; export it as PNG"),
    (b"%!PS", "unsupported_format", "PostScript; render it to PNG first"),
    (b"\xff\x0a", "unsupported_format", "a JPEG XL picture; convert it to PNG"),
    (b"\x00\x00\x00\x0cJXL \r\n\x87\n", "unsupported_format", "a JPEG XL picture; convert it to PNG"),
    (b"\x76\x2f\x31\x01", "unsupported_format", "an OpenEXR picture; convert it to 16-bit PNG"),
    (b"#?RADIANCE", "unsupported_format", "a Radiance HDR picture; convert it to 16-bit PNG"),
    (b"SIMPLE  =", "unsupported_format", "a FITS picture; convert it to 16-bit PNG"),
    (b"P7\n", "unsupported_format", "a PAM picture; convert it to PNG"),
    (b"PF\n", "unsupported_format", "a float PFM picture in colour; convert it to 16-bit PNG"),
    (b"icns", "unsupported_format", "an Apple icon; convert it to PNG"),
    (b"\x00\x00\x02\x00", "unsupported_format", "a cursor or a Targa picture; convert it to PNG"),
    (b"\x89PNG", "corrupt", "a PNG whose line ends were changed by a transfer as text; copy it as binary"),
    (b"\x1a\x45\xdf\xa3", "video", "a Matroska or WebM video"),
    (b"version https://git-lfs", "lfs_pointer", "a Git LFS pointer; run `git lfs pull` first"),
)

_WEB_PAGE = (b"<!doctype html", b"<html", b"<head", b"<body", b"<script", b"<title", b"<meta")
_TEXT_BYTES = frozenset(b"\t\n\r\f" + bytes(range(32, 127)))
_MIN_TEXT_BYTES = 4

AVIF_BRANDS = frozenset({b"avif", b"avis"})
HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})


def sniff_image_format(data: bytes | memoryview) -> str:
    """Name the image format, in Pillow's spelling, from the first bytes.

    Args:
        data: The whole file; only its head is read, except to tell JSON from other text.

    Returns:
        `JPEG`, `PNG`, `WEBP`, `GIF`, `TIFF`, `BMP`, `AVIF`, `HEIF`, `JPEG2000`, `PPM`, `ICO`, `QOI` or `DDS`.

    Raises:
        DecodeError: Reasons `empty`, `html`, `json`, `svg`, `xml`, `text`, `pdf`, `archive`, `video`,
            `lfs_pointer`, `corrupt`, `unsupported_format`, `not_an_image`.
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
    if b"crx " in brands:
        raise DecodeError("unsupported_format", "a camera raw file (CR3); develop it to JPEG or PNG")
    raise DecodeError("video", f"an MP4-like video with brand {head[8:12].decode('latin-1')!r}")


def _text_or_unknown(start: bytes, size: int) -> DecodeError:
    text = _as_utf8(start).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(_WEB_PAGE) or b"<html" in text[:256] or b"<!doctype html" in text[:256]:
        return DecodeError("html", "a web page was saved in place of the picture; download it again")
    if text.startswith(b"<svg") or (
        text.startswith((b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in text
    ):
        return DecodeError("svg", "a vector drawing; render it to PNG first")
    if text.startswith((b"<?xml", b"<error")):
        return DecodeError("xml", "an XML answer was saved in place of the picture; download it again")
    if text.startswith((b"{", b"[")) and text.isascii():
        return DecodeError("json", "a JSON answer was saved in place of the picture; download it again")
    if not any(start):
        return DecodeError("not_an_image", f"the first {len(start)} of {size} bytes are all zero")
    if len(text) >= _MIN_TEXT_BYTES and all(byte in _TEXT_BYTES for byte in text):
        shown = start[:40].decode("ascii", "replace").strip()
        return DecodeError("text", f"text stands in place of the picture: {shown!r}; download it again")
    return DecodeError("not_an_image", f"no known image starts with {start[:8].hex(' ')}")


def _as_utf8(start: bytes) -> bytes:
    """Text in UTF-16 with a mark as UTF-8; anything else as it is."""
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if start.startswith(mark):
            return start[2:].decode(encoding, "replace").encode()
    return start
