"""JSON lines, one object a line. Numbers of any size and the order of keys survive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from datapipe.sources.record import Fault
from datapipe.sources.row import Row, repeated_name

__all__ = ["RepeatedKeyError", "parse_json_object", "read_jsonl_rows"]

_MAX_LINE_BYTES: Final = 256 * 2**20


class RepeatedKeyError(ValueError):
    """A JSON object names one key twice. The message tells both positions."""


def parse_json_object(text: str) -> dict[str, object]:
    """Parse one JSON object strictly.

    Raises:
        RepeatedKeyError: If any object in it has a key twice.
        ValueError: If the text is not JSON or not an object.
    """
    value = json.loads(text, object_pairs_hook=_unique_pairs)
    if not isinstance(value, dict):
        raise ValueError(f"found a {type(value).__name__}, wanted an object")
    return value


def read_jsonl_rows(path: Path) -> Iterator[Row | Fault]:
    """Yield every line; a bad line becomes a fault and the next line is read."""
    with path.open("rb") as file:
        number = 0
        line_number = 0
        while True:
            line = file.readline(_MAX_LINE_BYTES)
            if not line:
                return
            line_number += 1
            place = f"{path.name}:{line_number}"
            if line_number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            number += 1
            yield _parse_line(line, place, number)


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


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    repeated = repeated_name([name for name, _ in pairs])
    if repeated is not None:
        name, first, second = repeated
        raise RepeatedKeyError(
            f"key {name!r} stands at positions {first} and {second} of one object; keep one"
        )
    return dict(pairs)
