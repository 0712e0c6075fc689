"""By what keys, files and samples are found to be the same."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from datapipe.judge import Row

__all__ = ["content_id", "content_of", "key_id", "picture_id"]


def key_id(key: str | None) -> int:
    """64-bit identity of a key."""
    return xxhash.xxh3_64_intdigest((key or "").encode())


def content_id(
    digest: str, caption: str | None, frame: int | None = None, columns: Mapping[str, object] | None = None
) -> int:
    """64-bit identity of all that makes a sample but its key and its place."""
    known = sorted((name, value) for name, value in (columns or {}).items() if value is not None)
    return xxhash.xxh3_64_intdigest(repr((digest, caption, frame, known)).encode("utf-8", "surrogatepass"))


def picture_id(digest: str) -> int:
    """64-bit identity of a file."""
    return int(digest[:16], 16)


def content_of(row: Row, digest: str) -> int:
    """64-bit identity of all that makes a row but its key and its place."""
    frame = None if row.media is None else row.media.columns.get("frame")
    return content_id(digest, row.caption, frame if isinstance(frame, int) else None, row.columns)
