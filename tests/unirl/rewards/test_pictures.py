from __future__ import annotations

import re

import numpy as np
import pytest

from unirl.rewards.pictures import fit_picture, picture_problem


def test_the_right_size_is_handed_back_untouched() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    assert fit_picture(picture, (32, 48)) is picture


@pytest.mark.parametrize("shape", [(1, 1), (27, 332), (28, 26), (64, 32), (31, 33), (199, 1)])
def test_any_shape_fits(shape: tuple[int, int]) -> None:
    picture = np.full((*shape, 3), 255, np.uint8)
    assert picture_problem(picture) is None
    fitted = fit_picture(picture, (32, 32))
    assert fitted.shape == (32, 32, 3)
    assert fitted.dtype == np.uint8
    assert (fitted == 255).any()


def test_the_shape_of_the_picture_is_kept_and_the_rest_is_grey() -> None:
    fitted = fit_picture(np.zeros((16, 64, 3), np.uint8), (32, 32))
    np.testing.assert_array_equal(fitted[:12], 128)
    np.testing.assert_array_equal(fitted[12:20], 0)
    np.testing.assert_array_equal(fitted[20:], 128)


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (np.zeros((0, 5, 3), np.uint8), "5x0, it has no pixels"),
        (np.zeros((17, 4000, 3), np.uint8), "4000x17, sides differ more than 200 times"),
        (np.zeros((32, 32), np.uint8), r"\(32, 32\), wanted uint8 \(rows, columns, 3\)"),
        (np.zeros((32, 32, 3), np.float32), "float32"),
    ],
)
def test_what_cannot_be_scored_is_said(picture: np.ndarray, words: str) -> None:
    problem = picture_problem(picture)
    assert problem is not None

    assert re.search(words, problem)
