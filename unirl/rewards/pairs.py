"""Examples for a yes/no reward: pictures with captions that are true of them, or not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from unirl.errors import ConfigError, ShapeError
from unirl.words import join_words, split_words

__all__ = ["ExampleMaker", "LabelledPictures", "PictureChange", "caption_pairs", "joined", "near_captions"]

PictureChange = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""uint8 (U, H, W, 3) -> uint8 (U, H, W, 3): a change to pictures, random by the generator only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledPictures:
    """U pictures and B questions about them. A picture that several questions share is seen once."""

    pictures: np.ndarray
    """uint8 (U, H, W, 3) RGB."""
    index: np.ndarray
    """int64 (B,), the picture of each question, in [0, U)."""
    captions: Sequence[str]
    """B captions."""
    labels: np.ndarray
    """bool (B,), True where caption and picture agree."""

    def __post_init__(self) -> None:
        if not len(self.index) == len(self.captions) == len(self.labels):
            raise ShapeError(
                f"examples: {len(self.index)} picture numbers, {len(self.captions)} captions, "
                f"{len(self.labels)} labels; wanted one of each for every question"
            )


ExampleMaker = Callable[[int, np.random.Generator], LabelledPictures]
"""(questions wanted, generator) -> examples. All chance comes from the generator: one seed, one training."""


def caption_pairs(
    pictures: np.ndarray,
    captions: Sequence[str],
    *,
    captions_per_picture: int = 2,
    hard_fraction: float = 0.5,
    avoid: Collection[str] = (),
    augment: PictureChange | None = None,
    corrupt: PictureChange | None = None,
    corrupt_fraction: float = 0.25,
) -> ExampleMaker:
    """Ask about each picture with its own caption (true) and with captions of other pictures (false).

    Args:
        pictures: Uint8 (N, H, W, 3).
        captions: N true captions.
        captions_per_picture: Questions about one picture: one true, the rest false.
        hard_fraction: Share of the false captions that differ from the true one in a word or in the order.
        avoid: Captions that never serve as a false one, for example those held out from training: a caption
            that is only ever seen as false would be learnt as false.
        augment: Changes pictures and keeps what they show.
        corrupt: Changes pictures so that they no longer show their caption.
        corrupt_fraction: Share of the pictures, when `corrupt` is given, that are asked about with their own
            caption after `corrupt`, all of them false.

    Returns:
        A maker of examples.

    Raises:
        ConfigError: If there are fewer than two different captions, or fewer than two captions to a picture.
        ShapeError: If pictures and captions differ in number.
    """
    if len(pictures) != len(captions):
        raise ShapeError(f"caption_pairs: {len(pictures)} pictures but {len(captions)} captions")
    if captions_per_picture < 2:
        raise ConfigError(f"caption_pairs: captions_per_picture is {captions_per_picture}, wanted 2 or more")
    known = sorted(set(captions))
    allowed = [caption for caption in known if caption not in avoid]
    if len(allowed) < 2:
        raise ConfigError("caption_pairs: fewer than two captions, a false one cannot always be found")
    near = {
        caption: [other for other in found if other not in avoid]
        for caption, found in near_captions(known).items()
    }
    refused = frozenset(known) | frozenset(avoid)

    def false_caption(true: str, generator: np.random.Generator) -> str:
        if generator.random() < hard_fraction:
            if near[true] and generator.random() < 0.75:
                return near[true][generator.integers(len(near[true]))]
            scrambled = _scramble(true, generator)
            if scrambled not in refused:
                return scrambled
        while (other := allowed[generator.integers(len(allowed))]) == true:
            pass
        return other

    def make(num_questions: int, generator: np.random.Generator) -> LabelledPictures:
        num_pictures = max(1, num_questions // captions_per_picture)
        rows = generator.integers(len(pictures), size=num_pictures)
        chosen = pictures[rows]
        if augment is not None:
            chosen = augment(chosen, generator)
        asked, labels = [], []
        for row in rows:
            true = captions[row]
            asked += [true, *(false_caption(true, generator) for _ in range(captions_per_picture - 1))]
            labels += [True] + [False] * (captions_per_picture - 1)
        index = np.repeat(np.arange(num_pictures), captions_per_picture)
        num_corrupt = round(corrupt_fraction * num_pictures) if corrupt is not None else 0
        if corrupt is not None and num_corrupt:
            chosen = np.concatenate([chosen, corrupt(chosen[:num_corrupt], generator)])
            asked += [captions[row] for row in rows[:num_corrupt]]
            labels += [False] * num_corrupt
            index = np.concatenate([index, np.arange(num_pictures, num_pictures + num_corrupt)])
        return LabelledPictures(pictures=chosen, index=index, captions=asked, labels=np.array(labels))

    return make


def joined(makers: Sequence[tuple[ExampleMaker, float]]) -> ExampleMaker:
    """Fill each batch from several makers, in shares of their weights."""
    total = sum(weight for _, weight in makers)

    def make(num_questions: int, generator: np.random.Generator) -> LabelledPictures:
        parts = [maker(max(1, round(num_questions * weight / total)), generator) for maker, weight in makers]
        offsets = np.cumsum([0, *(len(part.pictures) for part in parts[:-1])])
        return LabelledPictures(
            pictures=np.concatenate([part.pictures for part in parts]),
            index=np.concatenate([part.index + offset for part, offset in zip(parts, offsets)]),
            captions=[caption for part in parts for caption in part.captions],
            labels=np.concatenate([part.labels for part in parts]),
        )

    return make


def near_captions(captions: Sequence[str]) -> dict[str, list[str]]:
    """For each caption, the others that differ from it by one word: replaced, left out or added."""
    words = {caption: split_words(caption) for caption in captions}
    by_pattern: dict[tuple[str | None, ...], list[str]] = {}
    for caption, parts in words.items():
        for pattern in _one_word_off(parts):
            by_pattern.setdefault(pattern, []).append(caption)
    return {
        caption: sorted(
            {other for pattern in _one_word_off(parts) for other in by_pattern[pattern]} - {caption}
        )
        for caption, parts in words.items()
    }


def _one_word_off(parts: Sequence[str]) -> list[tuple[str | None, ...]]:
    """The caption with a gap for each word and with a gap between any two; None is the gap."""
    replaced = [(*parts[:place], None, *parts[place + 1 :]) for place in range(len(parts))]
    added = [(*parts[:place], None, *parts[place:]) for place in range(len(parts) + 1)]
    return replaced + added


def _scramble(caption: str, generator: np.random.Generator) -> str:
    """Break a caption with its own words: swap two, say one twice, leave one out, stop early, or go on."""
    parts = split_words(caption)
    if not parts:
        return caption
    place = int(generator.integers(len(parts)))
    before, word, after = parts[:place], parts[place], parts[place + 1 :]
    broken = (
        [*before, *after[:1], word, *after[1:]],
        [*before, word, word, *after],
        [*before, *after],
        before,
        [*parts, word, *after],
    )
    return join_words(broken[generator.integers(len(broken))])
