"""Text files with one prompt a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from datapipe.sources.compression import DAMAGE
from datapipe.sources.jsonl_rows import skip_line
from datapipe.sources.record import Fault, Note
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row
from datapipe.sources.text_file import open_bytes

__all__ = ["read_prompt_lines"]

_MAX_LINE_BYTES: Final = 2**20


def read_prompt_lines(path: SourcePath) -> Iterator[Row | Fault | Note]:
    """Yield every line as the value `caption`. Lines end with LF or CRLF; blank ones are noted.

    Raises:
        SourceError: If the file is UTF-16 or UTF-32.
    """
    with open_bytes(path) as file:
        number = line_number = 0
        while True:
            line_number += 1
            place = f"{path.name}:{line_number}"
            try:
                line = file.readline(_MAX_LINE_BYTES)
            except DAMAGE as error:
                yield Fault(key="", place=place, reason="bad_text", detail=f"reading stopped: {error}")
                return
            if not line:
                return
            if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                skip_line(file)
                detail = f"the line has more than {_MAX_LINE_BYTES} bytes"
                yield Fault(key="", place=place, reason="line_too_long", detail=detail)
                continue
            if not line.strip():
                yield Note(place=place, reason="blank_line", detail="a line without a prompt")
                continue
            number += 1
            yield _parse_line(line, place, number)


def _parse_line(line: bytes, place: str, number: int) -> Row | Fault:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"byte 0x{line[error.start]:02x} at position {error.start} of the line is not UTF-8"
        return Fault(key="", place=place, reason="not_utf8", detail=detail, data=line[:65536])
    return Row(place=place, number=number, values={"caption": text.removesuffix("\n").removesuffix("\r")})
