from __future__ import annotations

import time

import numpy as np
import pytest
from PIL import Image, ImageFilter

from recipes.worlds.handwriting import PAPER, DigitPools, caption_of, deal_digits, draw_number
from recipes.worlds.handwriting_judge import UNREADABLE, DigitJudge, number_in_caption
from unirl.errors import ShapeError
from unirl.types import Direction, Sample


@pytest.fixture(scope="module")
def judge() -> DigitJudge:
    return DigitJudge(0)


@pytest.fixture(scope="module")
def drawings() -> tuple[np.ndarray, np.ndarray]:
    """600 numbers and their pictures, of digits that the judge was not fitted on."""
    rng = np.random.default_rng(0)
    pool = deal_digits(0, DigitPools())["eval"]
    numbers = rng.integers(10, 100, 600)
    return numbers, np.stack([draw_number(int(number), pool, rng) for number in numbers])


def _sample(image: np.ndarray, caption: str, direction: Direction = "image") -> Sample:
    return Sample(key="k", direction=direction, caption=caption, image=image, target="a handwritten ten")


def test_reads_both_digits_of_unseen_hands(
    judge: DigitJudge, drawings: tuple[np.ndarray, np.ndarray]
) -> None:
    numbers, images = drawings
    assert (judge.read(images) == numbers).mean() >= 0.97


def test_reads_through_blur(judge: DigitJudge, drawings: tuple[np.ndarray, np.ndarray]) -> None:
    numbers, images = drawings
    soft = [np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(1))) for image in images]
    assert (judge.read(np.stack(soft)) == numbers).mean() >= 0.95


def test_garbage_is_unreadable(judge: DigitJudge, drawings: tuple[np.ndarray, np.ndarray]) -> None:
    _, images = drawings
    rng = np.random.default_rng(1)
    patches = images.reshape(-1, 8, 4, 8, 4, 3).swapaxes(2, 3).reshape(-1, 64, 4, 4, 3)
    shuffled = np.stack([picture[rng.permutation(64)] for picture in patches])
    shuffled = shuffled.reshape(-1, 8, 8, 4, 4, 3).swapaxes(2, 3).reshape(images.shape)
    soft = [np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(1.5))) for image in shuffled]
    half_empty = images.copy()
    half_empty[:, :, 16:] = PAPER
    for garbage in (
        np.full((2, 32, 32, 3), 255, np.uint8),
        np.zeros((2, 32, 32, 3), np.uint8),
        np.broadcast_to(PAPER, (2, 32, 32, 3)).astype(np.uint8),
        rng.integers(0, 256, (100, 32, 32, 3)).astype(np.uint8),
        half_empty,
        shuffled,
        np.stack(soft),
        np.rot90(images, axes=(1, 2)).copy(),
    ):
        assert (judge.read(garbage) == UNREADABLE).mean() >= 0.99


def test_is_fast_enough_to_run_at_every_evaluation(
    judge: DigitJudge, drawings: tuple[np.ndarray, np.ndarray]
) -> None:
    start = time.process_time()
    judge.read(drawings[1][:128])
    assert time.process_time() - start < 1.0


def test_judges_both_directions_by_what_it_reads(
    judge: DigitJudge, drawings: tuple[np.ndarray, np.ndarray]
) -> None:
    numbers, images = drawings
    read = judge.read(images[:20])
    place = int(np.flatnonzero(read == numbers[:20])[0])
    image, number = images[place], int(numbers[place])
    samples = [
        _sample(image, caption_of(number)),
        _sample(image, caption_of(number), "text"),
        _sample(image, caption_of(10 + (number - 9) % 90)),
        _sample(image, f"handwritten {number}"),
        _sample(np.zeros((32, 32, 3), np.uint8), caption_of(number)),
    ]
    verdicts = judge.judge(samples)
    assert verdicts.dtype == np.float64
    assert verdicts.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_nothing_to_judge(judge: DigitJudge) -> None:
    assert judge.judge([]).shape == (0,)
    assert judge.read(np.zeros((0, 32, 32, 3), np.uint8)).shape == (0,)


def test_a_picture_of_another_shape_is_an_error(judge: DigitJudge) -> None:
    with pytest.raises(ShapeError, match=r"found float64 \(1, 32, 32, 3\), wanted uint8"):
        judge.read(np.zeros((1, 32, 32, 3)))
    with pytest.raises(ShapeError, match=r"\(32, 32, 3\)"):
        judge.read(np.zeros((32, 32, 3), np.uint8))


@pytest.mark.parametrize(
    "caption", ["", "forty two", "a handwritten", "a handwritten forty two ", "a handwritten 42"]
)
def test_malformed_captions_name_no_number(caption: str) -> None:
    assert number_in_caption(caption) is None


def test_same_seed_same_judge(judge: DigitJudge, drawings: tuple[np.ndarray, np.ndarray]) -> None:
    images = drawings[1][:50]
    assert np.array_equal(DigitJudge(0).read(images), judge.read(images))
