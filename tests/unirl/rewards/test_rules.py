from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from unirl.errors import ConfigError
from unirl.rewards import ExactMatch, Format, Length, Pattern, PictureStatistic, PictureText
from unirl.rewards.ocr import edit_distance, wanted_text
from unirl.types import Sample

PICTURE = np.zeros((4, 4, 3), np.uint8)


def sample(caption: str, target: str) -> Sample:
    return Sample(key="k", direction="text", caption=caption, image=PICTURE, target=target)


def test_only_the_words_in_their_order_match() -> None:
    given = [
        sample("a red circle", "a red circle"),
        sample("  a red   circle ", "a red circle"),
        sample("a circle red", "a red circle"),
        sample("a red circle circle", "a red circle"),
        sample("A red circle", "a red circle"),
        sample("", "a red circle"),
    ]
    scores = ExactMatch().score(given)
    np.testing.assert_array_equal(scores.total, [1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(scores.components["exact_match"], scores.total)


def test_a_pattern_is_found_anywhere_or_matches_the_whole() -> None:
    given = [sample("a red circle", ""), sample("red", ""), sample("a bored circle", "")]
    np.testing.assert_array_equal(Pattern(r"\bred\b").score(given).total, [1, 1, 0])
    np.testing.assert_array_equal(Pattern("red", whole=True).score(given).total, [0, 1, 0])
    with pytest.raises(ConfigError, match=r"'\(' is no regular expression"):
        Pattern("(")


def test_length_falls_over_the_slack() -> None:
    given = [sample(" ".join(["w"] * words), "") for words in (0, 1, 2, 3, 4, 6, 9)]
    np.testing.assert_allclose(Length(2, 3, slack=4).score(given).total, [0.5, 0.75, 1, 1, 0.75, 0.25, 0])
    np.testing.assert_allclose(Length(2, 3).score(given).total, [0, 0, 1, 1, 0, 0, 0])


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("<think>x</think><answer>y</answer>", True),
        (" <think> x </think>\n<answer>y</answer> ", True),
        ("<think></think><answer>y</answer>", False),
        ("well, <think>x</think><answer>y</answer>", False),
        ("<think>x</think> so <answer>y</answer>", False),
        ("<think>x</think><answer>y</answer> done", False),
        ("<answer>y</answer><think>x</think>", False),
        ("<think>x</think><think>x</think><answer>y</answer>", False),
        ("", False),
    ],
)
def test_format(text: str, matches: bool) -> None:
    form = "<think>{reasoning}</think><answer>{answer}</answer>"
    assert Format(form).score([sample(text, "")]).total.tolist() == [matches]


def test_statistics_of_flat_and_noisy_pictures() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    half = np.zeros((64, 64, 3), np.uint8)
    half[:32] = 255
    given = [replace(sample("", ""), image=image) for image in (np.full_like(noise, 255), half, noise)]
    np.testing.assert_allclose(PictureStatistic("brightness").score(given[:2]).total, [1, 0.5], atol=1e-9)
    np.testing.assert_allclose(PictureStatistic("entropy").score(given[:2]).total, [0, 1])
    bits = PictureStatistic("jpeg_bits").score(given).total
    assert bits[0] < bits[1] < bits[2]
    inside = PictureStatistic("brightness", inside=(0.4, 0.6)).score(given).total
    np.testing.assert_allclose(inside[:2], [np.exp(-2), 1])


def test_text_in_a_picture_is_compared_by_letters() -> None:
    assert (edit_distance("kitten", "sitting"), edit_distance("", "abc")) == (3, 3)
    assert wanted_text('a sign that says "open  NOW" and "42"') == "open  NOW 42"
    reward = PictureText(lambda picture: "OPEN now", max_failed_fraction=0.5)
    given = [replace(sample(text, ""), key=text) for text in ('a sign "open now"', 'a sign "open"', "a sign")]
    np.testing.assert_allclose(reward.score(given).total, [1.0, 0.5, np.nan])
    assert reward.failures == {"no text wanted": 1}


def test_real_text_is_read_without_a_network() -> None:
    pytest.importorskip("rapidocr", reason="needs the extra `ocr`")
    picture = Image.new("RGB", (320, 120), "white")
    ImageDraw.Draw(picture).text((20, 40), "Hello World 42", fill="black", font=ImageFont.load_default(32))
    given = replace(sample('a card "hello world 42"', ""), image=np.asarray(picture))
    assert PictureText().score([given]).total[0] == 1.0
