from __future__ import annotations

import numpy as np
import pytest

from unirl.errors import ConfigError, ShapeError
from unirl.rewards import LabelledPictures, caption_pairs, joined
from unirl.rewards.pairs import near_captions

CAPTIONS = ["forty two", "forty three", "fifty two", "forty", "seventeen"]
PICTURES = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8)


def examples(num: int = 400, seed: int = 0, **options: object) -> LabelledPictures:
    return caption_pairs(PICTURES, CAPTIONS, **options)(num, np.random.default_rng(seed))  # type: ignore[arg-type]


def test_true_captions_are_true_and_false_ones_are_not() -> None:
    batch = examples()
    assert len(batch.captions) == 400
    for picture, caption, label in zip(
        batch.pictures[batch.index], batch.captions, batch.labels, strict=True
    ):
        assert (CAPTIONS[picture[0, 0, 0]] == caption) == label
    assert batch.labels.mean() == 0.5


def test_one_seed_gives_one_batch() -> None:
    assert examples(seed=1).captions == examples(seed=1).captions
    assert examples(seed=1).captions != examples(seed=2).captions


def test_half_of_the_false_captions_are_near() -> None:
    """Near: one word off, or the same words in another order, doubled, left out or cut short."""
    batch = examples(4000)
    words = {word for caption in CAPTIONS for word in caption.split()}
    false = [caption for caption, label in zip(batch.captions, batch.labels, strict=True) if not label]
    assert {word for caption in false for word in caption.split()} <= words
    unseen = np.mean([caption not in CAPTIONS for caption in false])
    assert 0.1 < unseen < 0.25
    assert np.mean([caption not in CAPTIONS for caption in examples(hard_fraction=0.0).captions]) == 0


def test_avoided_captions_are_never_false() -> None:
    batch = examples(4000, avoid=["forty", "fifty two"])
    false = {caption for caption, label in zip(batch.captions, batch.labels, strict=True) if not label}
    assert "forty three" in false
    assert not false & {"forty", "fifty two"}


def test_near_is_one_word_replaced_left_out_or_added() -> None:
    assert near_captions(CAPTIONS) == {
        "forty two": ["fifty two", "forty", "forty three"],
        "forty three": ["forty", "forty two"],
        "fifty two": ["forty two"],
        "forty": ["forty three", "forty two", "seventeen"],
        "seventeen": ["forty"],
    }


def test_augmented_and_corrupted_pictures() -> None:
    batch = examples(
        80,
        augment=lambda pictures, generator: pictures + 100,
        corrupt=lambda pictures, generator: pictures + 100,
        corrupt_fraction=0.5,
    )
    values = batch.pictures[batch.index][:, 0, 0, 0]
    assert batch.pictures.shape == (60, 8, 8, 3)
    assert set(values[:80] // 100) == {1}
    assert set(values[80:] // 100) == {2}
    assert not batch.labels[80:].any()
    for value, caption in zip(values[80:], batch.captions[80:], strict=True):
        assert CAPTIONS[value - 200] == caption


def test_joined_makers_share_a_batch_by_weight() -> None:
    plain = caption_pairs(PICTURES, CAPTIONS)
    moved = caption_pairs(PICTURES, CAPTIONS, augment=lambda pictures, generator: pictures + 100)
    batch = joined([(plain, 3.0), (moved, 1.0)])(400, np.random.default_rng(0))
    values = batch.pictures[batch.index][:, 0, 0, 0]
    assert (values >= 100).mean() == 0.25
    for value, caption, label in zip(values % 100, batch.captions, batch.labels, strict=True):
        assert (CAPTIONS[value] == caption) == label


@pytest.mark.parametrize(
    ("pictures", "captions", "options", "error"),
    [
        (PICTURES, CAPTIONS[:4], {}, ShapeError),
        (PICTURES, ["one"] * 5, {}, ConfigError),
        (PICTURES, CAPTIONS, {"avoid": CAPTIONS[:4]}, ConfigError),
        (PICTURES, CAPTIONS, {"captions_per_picture": 1}, ConfigError),
    ],
)
def test_what_cannot_be_paired(
    pictures: np.ndarray, captions: list[str], options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        caption_pairs(pictures, captions, **options)  # type: ignore[arg-type]


def test_parts_of_a_batch_must_agree_in_number() -> None:
    with pytest.raises(ShapeError, match="2 picture numbers, 1 captions"):
        LabelledPictures(pictures=PICTURES, index=np.zeros(2, int), captions=["a"], labels=np.ones(2, bool))
