"""What a cell that holds or names a picture or a video leads to."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from datapipe.errors import DecodeError
from datapipe.sources.paths import file_loader, locate_file
from datapipe.sources.record import Note
from datapipe.sources.remote import SourcePath, is_url

__all__ = ["OpenedMedium", "open_medium"]

# How JPEG, PNG, GIF, WebP, little- and big-endian TIFF begin in base64. No path of this length begins so.
_BASE64_MAGIC: Final = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "SUkqA", "TU0AK")
_BASE64_FTYP: Final = "Z0eXB"
_MIN_BASE64_CHARS: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedMedium:
    """A medium that is there. Its bytes are read when load is called."""

    load: Callable[[], bytes]
    path: SourcePath | None = None  # of a file beside the table; None when the row holds the bytes
    notes: tuple[Note, ...] = ()


def open_medium(value: object, folder: SourcePath, place: str) -> OpenedMedium | None:
    """Open bytes, a path relative to folder, base64 text (bare or a `data:` URI), or {bytes, path}.

    Returns:
        None for null, and for {bytes, path} in which both are.

    Raises:
        DecodeError: Reasons `bad_base64`, `remote_url`, `image_other_type`, and those of locate_file.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        inner = value.get("bytes")
        return open_medium(inner if inner is not None else value.get("path"), folder, place)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return OpenedMedium(load=lambda: data)
    if not isinstance(value, str):
        kind = type(value).__name__
        raise DecodeError("image_other_type", f"found a {kind}; wanted bytes, a path or {{bytes, path}}")
    encoded = _base64_payload(value)
    if encoded is not None:
        decoded = _from_base64(encoded)
        return OpenedMedium(load=lambda: decoded)
    if is_url(value):
        raise DecodeError("remote_url", f"{value!r:.100} is a URL, which is not fetched; download it first")
    path, notes = locate_file(folder, value, place)
    return OpenedMedium(load=file_loader(path), path=path, notes=tuple(notes))


def _base64_payload(text: str) -> str | None:
    """The base64 text of a `data:` URI or of a bare picture; None for a path."""
    if text.startswith("data:"):
        head, _, payload = text.partition(",")
        if not head.endswith(";base64"):
            raise DecodeError("bad_base64", f"{text[:60]!r}: only base64 data URIs hold pictures")
        return payload
    is_box = text.startswith("AAAA") and text.startswith(_BASE64_FTYP, 6)  # AVIF, HEIC, MP4
    return text if len(text) >= _MIN_BASE64_CHARS and (is_box or text.startswith(_BASE64_MAGIC)) else None


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DecodeError("bad_base64", f"{text[:60]!r}: {error}") from error
