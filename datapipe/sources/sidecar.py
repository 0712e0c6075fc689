"""Caption and JSON files that stand beside a picture."""

from __future__ import annotations

from collections.abc import Mapping

from datapipe.errors import DecodeError
from datapipe.sources.jsonl_rows import RepeatedKeyError, parse_json_object
from datapipe.sources.paths import loader_below
from datapipe.sources.record import MISSING, Missing
from datapipe.sources.remote import SourcePath

__all__ = ["caption_text", "json_values", "merge_caption", "one_caption", "read_caption", "read_sidecars"]


def read_sidecars(root: SourcePath, paths: list[str]) -> tuple[str | Missing, dict[str, object]]:
    """Read what belongs to one picture: the text of .txt or .caption, and the values of .json.

    Args:
        root: A folder.
        paths: From its listing.

    Raises:
        DecodeError: Reasons `not_utf8`, `bad_json`, `unreadable_file`, and `two_captions` when two files
            give different texts.
    """
    values: dict[str, object] = {}
    texts: dict[str, str] = {}
    for path in paths:
        data = loader_below(root, path)()
        name = path.rpartition("/")[2]
        if name.lower().endswith(".json"):
            values.update(json_values(data, name))
        else:
            texts[name] = caption_text(data, name)
    return one_caption(texts), values


def read_caption(root: SourcePath, paths: list[str]) -> str | Missing:
    """The text of the .txt and .caption files of one picture; see read_sidecars."""
    return read_sidecars(root, paths)[0]


def one_caption(texts: Mapping[str, str]) -> str | Missing:
    """Return the text that all caption files agree on, or MISSING when there are none.

    Raises:
        DecodeError: Reason `two_captions`.
    """
    if len(set(texts.values())) > 1:
        raise DecodeError("two_captions", f"{' and '.join(texts)} hold different texts; keep one")
    return next(iter(texts.values()), MISSING)


def caption_text(data: bytes, name: str) -> str:
    """Decode the text of a caption file. A byte order mark and line ends after the text are dropped.

    Raises:
        DecodeError: Reason `not_utf8`, with the byte and its position.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError(
            "not_utf8", f"{name!r}: byte 0x{data[error.start]:02x} at position {error.start} is not UTF-8"
        ) from error
    return text.removeprefix("\ufeff").rstrip("\r\n")


def json_values(data: bytes, name: str) -> dict[str, object]:
    """Parse a JSON object from a sidecar file or a tar member.

    Raises:
        DecodeError: Reasons `not_utf8`, `bad_json` and `repeated_key`.
    """
    text = caption_text(data, name)
    try:
        return parse_json_object(text)
    except RepeatedKeyError as error:
        raise DecodeError("repeated_key", f"{name!r}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DecodeError("bad_json", f"{name!r}: {error}") from error


def merge_caption(text: str | Missing, listed: object) -> object:
    """Join the caption of a text file with that of the JSON values beside it.

    Raises:
        DecodeError: Reason `two_captions` when both are there and differ.
    """
    if text is MISSING:
        return listed
    if listed is not MISSING and listed != text:
        raise DecodeError("two_captions", f"the text file says {text!r:.60}, the JSON file {listed!r:.60}")
    return text
