"""What a blob is by its first bytes, for the ending of its name. Nothing is decoded."""

from __future__ import annotations

from storage.blobs import Blob

__all__ = ["is_image", "media_ending"]

_IMAGES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
}
_OTHERS = {b"\x1aE\xdf\xa3": "mkv", b"OggS": "ogg", b"fLaC": "flac", b"ID3": "mp3"}
_RIFF = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}
_AVIF = (b"avif", b"avis")


def media_ending(blob: Blob) -> str:
    """The usual ending of a file of this content, without a dot; "bin" for what is not known."""
    head = bytes(memoryview(blob).cast("B")[:16])
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "bin")
    if head[4:8] == b"ftyp":
        return "avif" if head[8:12] in _AVIF else "mp4"
    for start, ending in (_IMAGES | _OTHERS).items():
        if head.startswith(start):
            return ending
    return "bin"


def is_image(blob: Blob) -> bool:
    """Whether the content is a picture in one of the usual formats."""
    return media_ending(blob) in {*_IMAGES.values(), "webp", "avif"}
