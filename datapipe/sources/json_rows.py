"""A JSON file that holds one array of objects, read object by object, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, TextIO

from datapipe.errors import SourceError
from datapipe.sources.compression import DAMAGE
from datapipe.sources.jsonl_rows import (
    RepeatedKeyError,
    has_json_lines,
    read_jsonl_rows,
    unique_pairs,
)
from datapipe.sources.record import Fault
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row
from datapipe.sources.text_file import open_text, undecodable_byte

__all__ = ["read_json_rows"]

_CHUNK_CHARS: Final = 2**20
_MAX_OBJECT_CHARS: Final = 64 * 2**20
_SPACE: Final = " \t\r\n"


def read_json_rows(path: SourcePath) -> Iterator[Row | Fault]:
    """Yield every object of the array. After a syntax error the rest is not read.

    A file of JSON lines under this name is read as such.

    Raises:
        SourceError: If the file is UTF-16 or UTF-32.
    """
    if has_json_lines(path):
        yield from read_jsonl_rows(path)
        return
    number = 0
    try:
        with open_text(path) as file:
            for value, text in _objects(_Window(file)):
                number += 1
                yield _row(value, text, f"{path.name}#{number}", number)
    except SourceError:
        raise
    except (ValueError, RecursionError, *DAMAGE) as error:
        detail = f"{error}; objects from here on were not read"
        yield Fault(key="", place=f"{path.name}#{number + 1}", reason="bad_json", detail=detail)


class _Window:
    """The part of the text that is being parsed."""

    def __init__(self, file: TextIO) -> None:
        self.text = ""
        self.at = 0
        self._file = file

    def grow(self) -> bool:
        """Read at least as much as is there already; False at the end of the file."""
        self.text = self.text[self.at :]
        self.at = 0
        if len(self.text) > _MAX_OBJECT_CHARS:
            raise ValueError(f"an object has more than {_MAX_OBJECT_CHARS} characters")
        more = self._file.read(max(_CHUNK_CHARS, len(self.text)))
        self.text += more
        return bool(more)

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.grow():
                return ""


def _objects(window: _Window) -> Iterator[tuple[object, str]]:
    """Each object with its text; one that repeats a key comes as the error."""
    _expect(window, "[")
    if window.peek() == "]":
        window.at += 1
        _expect_end(window)
        return
    while True:
        if window.peek() != "{":
            raise ValueError(f"found {window.peek()!r}, wanted an object")
        yield _object(window)
        if window.peek() == "]":
            window.at += 1
            _expect_end(window)
            return
        _expect(window, ",")


def _object(window: _Window) -> tuple[object, str]:
    while True:
        repeated: list[RepeatedKeyError] = []

        def pairs(found: list[tuple[str, object]], seen: list[RepeatedKeyError] = repeated) -> object:
            try:
                return unique_pairs(found)
            except RepeatedKeyError as error:
                seen.append(error)
                return {}

        try:
            decoder = json.JSONDecoder(object_pairs_hook=pairs)
            value, end = decoder.raw_decode(window.text, window.at)
        except json.JSONDecodeError:
            if not window.grow():
                raise
            continue
        text, window.at = window.text[window.at : end], end
        return (repeated[0] if repeated else value), text


def _expect(window: _Window, char: str) -> None:
    found = window.peek()
    if found != char:
        raise ValueError(f"found {found or 'the end of the file'!r}, wanted {char!r} of an array of objects")
    window.at += 1


def _expect_end(window: _Window) -> None:
    found = window.peek()
    if found:
        raise ValueError(f"found {found!r} after the end of the array")


def _row(value: object, text: str, place: str, number: int) -> Row | Fault:
    byte = None if text.isascii() else undecodable_byte(text)
    if byte is not None:
        return Fault(key="", place=place, reason="not_utf8", detail=f"byte 0x{byte:02x} is not UTF-8")
    if isinstance(value, RepeatedKeyError):
        return Fault(key="", place=place, reason="repeated_key", detail=str(value))
    if not isinstance(value, dict):
        raise ValueError(f"found a {type(value).__name__}, wanted an object")
    return Row(place=place, number=number, values=value)
