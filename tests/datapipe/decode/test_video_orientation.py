"""Display matrices: every turn and mirror of a small picture, worked by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from datapipe.decode.video.orientation import UPRIGHT, Orientation, parse_display_matrix

ONE = 1 << 16
PICTURE = np.arange(6, dtype=np.uint8).reshape(2, 3, 1).repeat(3, axis=2)  # 0 1 2 / 3 4 5


def matrix(a: int, b: int, c: int, d: int) -> bytes:
    return struct.pack("=9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)


@pytest.mark.parametrize(
    ("values", "orientation", "shown"),
    [
        ((1, 0, 0, 1), Orientation(), [[0, 1, 2], [3, 4, 5]]),
        ((0, 1, -1, 0), Orientation(rotation=90), [[3, 0], [4, 1], [5, 2]]),
        ((-1, 0, 0, -1), Orientation(rotation=180), [[5, 4, 3], [2, 1, 0]]),
        ((0, -1, 1, 0), Orientation(rotation=270), [[2, 5], [1, 4], [0, 3]]),
        ((-1, 0, 0, 1), Orientation(is_mirrored=True), [[2, 1, 0], [5, 4, 3]]),
        ((1, 0, 0, -1), Orientation(rotation=180, is_mirrored=True), [[3, 4, 5], [0, 1, 2]]),
        ((0, 1, 1, 0), Orientation(rotation=90, is_mirrored=True), [[0, 3], [1, 4], [2, 5]]),
        ((0, -1, -1, 0), Orientation(rotation=270, is_mirrored=True), [[5, 2], [4, 1], [3, 0]]),
    ],
)
def test_turns_and_mirrors(
    values: tuple[int, int, int, int], orientation: Orientation, shown: list[list[int]]
) -> None:
    found = parse_display_matrix(matrix(*(value * ONE for value in values)))
    assert found == orientation
    assert found.apply(PICTURE)[..., 0].tolist() == shown
    assert found.swaps_axes == (len(shown) == 3)


def test_a_slanted_matrix_is_taken_to_the_nearest_quarter() -> None:
    assert parse_display_matrix(matrix(60000, 9000, -9000, 60000)) == UPRIGHT
    assert parse_display_matrix(matrix(9000, 60000, -60000, 9000)).rotation == 90


@pytest.mark.parametrize("data", [b"", bytes(36), bytes(20), matrix(ONE, 0, 0, 0), matrix(0, ONE, 0, 0)])
def test_a_matrix_without_a_turn_is_upright(data: bytes) -> None:
    assert parse_display_matrix(data) == UPRIGHT
