"""Formats and non-pictures by their first bytes."""

from __future__ import annotations

import pytest

from datapipe.decode import sniff_image_format
from datapipe.errors import DecodeError


@pytest.mark.parametrize(
    ("head", "format"),
    [
        (b"\xff\xd8\xff\xe0....", "JPEG"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "WEBP"),
        (b"GIF89a", "GIF"),
        (b"MM\0*", "TIFF"),
        (b"BM\0\0", "BMP"),
        (b"P6\n3 4\n255\n", "PPM"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF"),
        (b"\0\0\0\x20ftypmif1\0\0\0\0mif1avifmiaf", "AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIF"),
        (b"\0\0\x01\0\x01\0", "ICO"),
        (b"qoif\0\0", "QOI"),
    ],
)
def test_pictures(head: bytes, format: str) -> None:
    assert sniff_image_format(head) == format
    assert sniff_image_format(memoryview(head)) == format


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\xef\xbb\xbf  <!DOCTYPE HTML>", "html"),
        (b"<script></script>\n<HTML lang=en>", "html"),
        (b'  {"error": 404}', "json"),
        ("\ufeff<!DOCTYPE html>".encode("utf-16-le"), "html"),
        (b"<?xml version='1.0'?><!DOCTYPE html PUBLIC>", "html"),
        (b"<script>location='/login'</script>", "html"),
        (b"<?xml version='1.0'?><svg/>", "svg"),
        (b"<!-- made by hand --><svg/>", "svg"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "xml"),
        (b"404 Not Found\n", "text"),
        (b"hello", "text"),
        ("höllo".encode("latin-1"), "not_an_image"),
        (b"abc", "not_an_image"),
        (b"%PDF-1.7", "pdf"),
        (b"PK\x03\x04", "archive"),
        (b"\x1f\x8b\x08", "archive"),
        (b"Rar!\x1a\x07\0", "archive"),
        (b"\x28\xb5\x2f\xfd\0", "archive"),
        (b"BZh91AY", "archive"),
        (b"\xfd7zXZ\0\0", "archive"),
        (b"\xff\x0a\xfa\x1f", "unsupported_format"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "unsupported_format"),
        (b"\x76\x2f\x31\x01\x02\0\0\0", "unsupported_format"),
        (b"\x89PNG\n\x1a\n\0\0\0\x0dIHDR", "corrupt"),
        (b"8BPS\0\x01", "unsupported_format"),
        (b"#?RADIANCE\nFORMAT=", "unsupported_format"),
        (b"SIMPLE  =                    T", "unsupported_format"),
        (b"P7\nWIDTH 2\n", "unsupported_format"),
        (b"PF\n8 8\n-1.0\n", "unsupported_format"),
        (b"icns\0\0\x10\0", "unsupported_format"),
        (b"\0\0\x02\0\x01\0", "unsupported_format"),
        (b"\0\0\0\x18ftypcrx \0\0\0\x01crx isom", "unsupported_format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "unsupported_format"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "video"),
        (b"\x1a\x45\xdf\xa3", "video"),
        (b"RIFF\x10\0\0\0WAVEfmt ", "not_an_image"),
        (b"\0" * 600, "not_an_image"),
    ],
)
def test_everything_else_has_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        sniff_image_format(data)
    assert caught.value.reason == reason
    assert str(caught.value) == f"{reason}: {caught.value.detail}"
