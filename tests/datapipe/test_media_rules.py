"""How the options of an ingest are read, and what is wrong with those that cannot be."""

from __future__ import annotations

import pytest

from datapipe.errors import DataError
from datapipe.media_rules import (
    Encoding,
    MediaRules,
    Resizing,
    TensorRule,
    parse_background,
    parse_encoding,
    parse_resizing,
    parse_tensor,
)


def test_what_can_be_written() -> None:
    assert parse_resizing("512") == Resizing(width=512, height=512, is_exact=False)
    assert parse_resizing("384x256") == Resizing(width=384, height=256, is_exact=True)
    assert parse_encoding("jpeg:90") == Encoding(format="jpeg", quality=90)
    assert parse_encoding("webp") == Encoding(format="webp", quality=95)
    assert parse_encoding("png") == Encoding(format="png", quality=None)
    tensor = TensorRule(name="pixels", dtype="uint8", height=224, width=192)
    assert parse_tensor("pixels:uint8[3,224,192]") == parse_tensor("pixels:uint8[3, 224, 192]") == tensor
    assert tensor.shape == (3, 224, 192)
    for ground in ("white", "#fff", "#ffffff", "255,255,255", (255, 255, 255)):
        assert parse_background(ground) == (255, 255, 255)
    assert parse_background("#01020380") == (1, 2, 3)


@pytest.mark.parametrize("text", ["", "0", "-1", "1x", "x1", "1x2x3", "70000", "a", "1.5", "512x0"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(DataError, match=r"wanted the larger side, such as 512, or WIDTHxHEIGHT"):
        parse_resizing(text)


@pytest.mark.parametrize("text", ["", "jpg:90", "jpeg:", "jpeg:0", "jpeg:101", "png:9", "avif", "jpeg:9.5"])
def test_encodings_that_are_none(text: str) -> None:
    with pytest.raises(DataError, match="wanted jpeg:QUALITY or webp:QUALITY"):
        parse_encoding(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pixels", "it has another form"),
        ("pixels:uint8", "it has another form"),
        (":uint8[3,2,2]", "it has another form"),
        ("pixels:uint8[3;2;2]", "it has another form"),
        (
            "a b:uint8[3,2,2]",
            "the name has 1 to 128 letters, digits, '_', '-' and '.', and does not begin .*",
        ),
        ("../a:uint8[3,2,2]", "the name has 1 to 128 letters.*"),
        ("Width:uint8[3,2,2]", "'Width' is a column of the index already; choose another name"),
        ("pixels:int8[3,2,2]", "dtype 'int8' is none of uint8, float16, float32"),
        ("pixels:uint8[2,2,3]", r"the shape \[2, 2, 3\] is not \[3, height, width\]"),
        ("pixels:uint8[3,2]", r"the shape \[3, 2\] is not \[3, height, width\]"),
        ("pixels:uint8[3,0,2]", r"the shape \[3, 0, 2\] is not \[3, height, width\]"),
    ],
)
def test_tensors_that_are_none(text: str, problem: str) -> None:
    with pytest.raises(DataError, match=f"{problem}; wanted NAME:DTYPE"):
        parse_tensor(text)


@pytest.mark.parametrize("value", ["whitish", "256,0,0", "1,2", "#12345", (1, 2), (1, 2, 300), ""])
def test_grounds_that_are_none(value: str | tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="wanted a name such as white, #rrggbb, or R,G,B"):
        parse_background(value)


def test_rules_that_do_not_go_together() -> None:
    pixels = TensorRule(name="a", dtype="uint8", height=2, width=2)
    for rules in ({"tensors": (pixels,)}, {"resize": parse_resizing("5")}, {"frames": "all"}):
        with pytest.raises(DataError, match="trust reads headers only"):
            MediaRules(trust=True, **rules)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="tensor column 'a' is asked for twice"):
        MediaRules(tensors=(pixels, pixels))
    with pytest.raises(DataError, match="frames is 'last', wanted one of first, all, skip"):
        MediaRules(frames="last")  # type: ignore[arg-type]


def test_the_larger_side_decides_and_nothing_grows() -> None:
    most = parse_resizing("100")
    assert [most.size_for(*size) for size in ((200, 50), (50, 400), (100, 7), (3, 2), (1, 9000))] == [
        (100, 25), (12, 100), (100, 7), (3, 2), (1, 100),
    ]  # fmt: skip
    assert parse_resizing("30x20").size_for(5, 5) == (20, 30)
