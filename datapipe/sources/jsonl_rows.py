"""JSON lines, one object a line. Numbers of any size and the order of keys survive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Final

from datapipe.sources.compression import DAMAGE
from datapipe.sources.record import Fault
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row, repeated_name
from datapipe.sources.text_file import open_bytes

__all__ = [
    "RepeatedKeyError",
    "has_json_lines",
    "parse_json_object",
    "read_jsonl_rows",
    "skip_line",
    "unique_pairs",
]

_MAX_LINE_BYTES: Final = 256 * 2**20


class RepeatedKeyError(ValueError):
    """A JSON object names one key twice. The message tells both positions."""


def parse_json_object(text: str) -> dict[str, object]:
    """Parse one JSON object strictly.

    Raises:
        RepeatedKeyError: If any object in it has a key twice.
        ValueError: If the text is not JSON or not an object.
    """
    value = _DECODER.decode(text)
    if not isinstance(value, dict):
        raise ValueError(f"found a {type(value).__name__}, wanted an object")
    return value


def read_jsonl_rows(path: SourcePath) -> Iterator[Row | Fault]:
    """Yield every line; a bad line becomes a fault and the next line is read.

    Raises:
        SourceError: If the file is UTF-16 or UTF-32.
    """
    with open_bytes(path) as file:
        number = 0
        line_number = 0
        while True:
            line_number += 1
            place = f"{path.name}:{line_number}"
            try:
                line = file.readline(_MAX_LINE_BYTES)
                is_cut = len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n")
                if is_cut:
                    skip_line(file)
            except DAMAGE as error:
                detail = f"reading stopped before this line: {error}"
                yield Fault(key="", place=place, reason="bad_json", detail=detail)
                return
            if not line:
                return
            if not line.strip():
                continue
            number += 1
            if is_cut:
                detail = f"the line has more than {_MAX_LINE_BYTES} bytes"
                yield Fault(key="", place=place, reason="line_too_long", detail=detail)
            else:
                yield _parse_line(line, place, number)


def has_json_lines(path: SourcePath) -> bool:
    """Whether the first line is a whole JSON object, and another line follows it.

    Raises:
        SourceError: If the file is UTF-16 or UTF-32.
    """
    with open_bytes(path) as file:
        try:
            first = b" "
            while first and not first.strip():
                first = file.readline(_MAX_LINE_BYTES)
            return (
                first.lstrip()[:1] == b"{" and bool(parse_json_object(first.decode())) and bool(file.read(1))
            )
        except (ValueError, RecursionError, *DAMAGE):
            return False  # reported when the rows are read


def skip_line(file: IO[bytes]) -> None:
    """Go to the start of the next line."""
    while rest := file.readline(_MAX_LINE_BYTES):
        if rest.endswith(b"\n"):
            return


def _parse_line(line: bytes, place: str, number: int) -> Row | Fault:
    def fault(reason: str, detail: str) -> Fault:
        return Fault(key="", place=place, reason=reason, detail=detail, data=line[:65536])

    try:
        return Row(place=place, number=number, values=parse_json_object(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        byte = line[error.start]
        return fault("not_utf8", f"byte 0x{byte:02x} at position {error.start} of the line is not UTF-8")
    except RepeatedKeyError as error:
        return fault("repeated_key", str(error))
    except RecursionError:
        return fault("bad_json", "the line is nested too deeply")
    except ValueError as error:
        return fault("bad_json", f"{error}: {line[:80]!r}")


def unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The pairs as a dict.

    Raises:
        RepeatedKeyError: If a name stands twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        name, first, second = repeated_name([name for name, _ in pairs]) or ("", 0, 0)
        raise RepeatedKeyError(
            f"key {name!r} stands at positions {first} and {second} of one object; keep one"
        )
    return found


_DECODER: Final = json.JSONDecoder(object_pairs_hook=unique_pairs)
