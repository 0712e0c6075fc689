"""Which records become rows."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from datapipe.errors import DecodeError
from datapipe.judge import Judge, Row, checked_key
from datapipe.media_rules import MediaRules
from datapipe.sources import MISSING, Fault, Record
from datapipe.sources.column_kinds import ColumnKinds


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (3, 2)).save(buffer, "PNG")
    return buffer.getvalue()


def judge(optional: tuple[str, ...] = (), rules: MediaRules | None = None, **record: object) -> Row | Fault:
    kinds = ColumnKinds()
    given = {"key": "k", "place": "p", "load": png, "caption": "c"} | record
    found = Record(**given)  # type: ignore[arg-type]
    kinds.observe(found.columns, "p")
    judged = Judge(kinds=kinds, optional=frozenset(optional), media=rules or MediaRules())(found, "s")
    if isinstance(judged, Fault):
        return judged
    assert len(judged) == 1
    return judged[0]


def test_a_good_record() -> None:
    row = judge(columns={"n": 1})
    assert isinstance(row, Row) and row.blob == png()
    assert row.index_columns() == {
        **{"source": "s", "place": "p", "modality": "image+text", "caption": "c", "width": 3, "height": 2},
        **{"format": "png", "mode": "L", "had_alpha": False, "exif_orientation": 1, "n_frames": 1, "n": 1},
        "phash": "0" * 16,
    }


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"key": ""}, "key_empty"),
        ({"key": None}, "key_none"),
        ({"key": MISSING}, "key_none"),
        ({"key": True}, "key_bool"),
        ({"key": 1.5}, "key_number"),
        ({"key": "a\0b"}, "nul_byte"),
        ({"key": "\udce9"}, "not_utf8"),
        ({"caption": MISSING}, "caption_missing"),
        ({"caption": None}, "caption_none"),
        ({"load": None}, "image_missing"),
        ({"load": lambda: b""}, "empty"),
        ({"columns": {"x": "a\0"}}, "nul_byte"),
    ],
)
def test_faults(record: dict[str, object], reason: str) -> None:
    fault = judge(**record)
    assert isinstance(fault, Fault) and (fault.reason, fault.place) == (reason, "p")
    fault.key.encode()


def test_the_bytes_of_a_broken_picture_are_kept_up_to_a_limit() -> None:
    fault = judge(load=lambda: b"x" * (3 * 2**20))
    assert isinstance(fault, Fault) and fault.data == b"x" * 2**20


@pytest.mark.parametrize("caption", [MISSING, None, "", "  "])
def test_an_optional_caption_may_be_absent(caption: object) -> None:
    row = judge(("caption",), caption=caption)
    assert isinstance(row, Row) and row.caption is None and row.index_columns()["modality"] == "image"
    assert isinstance(judge(("caption",), caption=3), Fault)


def test_an_optional_picture_may_be_absent_but_not_broken() -> None:
    row = judge(("image",), load=None)
    assert (
        isinstance(row, Row)
        and row.index_columns()["modality"] == "text"
        and "width" not in row.index_columns()
    )
    assert isinstance(judge(("image",), load=lambda: b"junk"), Fault)


def test_whole_numbers_are_keys() -> None:
    assert [checked_key(value) for value in (7, np.int64(8), "007")] == ["7", "8", "007"]
    with pytest.raises(DecodeError):
        checked_key(b"x")
