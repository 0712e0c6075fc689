from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from unirl.errors import ConfigError
from unirl.rewards import Question
from unirl.rewards.backends import CLIP_MARK, IMAGE_MARK
from unirl.rewards.failures import Problem
from unirl.types import Sample


def test_saved_and_read_again(tmp_path: Path) -> None:
    question = Question(yes=("ja",), no=("nein",), image_size=(64, 32), normalization="vocabulary")
    question.save(tmp_path, training={"accuracy": 0.9})
    assert Question.load(tmp_path) == question
    assert json.loads((tmp_path / "reward.json").read_text())["training"] == {"accuracy": 0.9}


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError, match=r"0 \{caption\}.*1 <\|image_pad\|>, wanted one .*normalization"):
        Question(template="is it good <|image_pad|> ?", normalization="sum")  # type: ignore[arg-type]


def test_the_picture_comes_before_the_caption() -> None:
    with pytest.raises(ConfigError, match="before it shows"):
        Question(template=f"is {{caption}} in {IMAGE_MARK} ?")


def test_a_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unirl reward train"):
        Question.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"format": 9}, "format 9, this version reads 1"), ({"question": {"tmplate": ""}}, "tmplate")],
)
def test_another_format_or_field_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    Question().save(tmp_path)
    path = tmp_path / "reward.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        Question.load(tmp_path)


def sample(**change: object) -> Sample:
    fields = {"key": "k", "direction": "image", "caption": "a cat", "target": ""}
    return Sample(**{"image": np.zeros((8, 16, 3), np.uint8), **fields, **change})  # type: ignore[arg-type]


def test_several_pictures_have_a_mark_each() -> None:
    question = Question(template=f"{IMAGE_MARK} do these show {{caption}} ?", image_size=(8, 8))
    asked = question.request(sample(more_images=(np.zeros((4, 4, 3), np.uint8),)))
    assert not isinstance(asked, Problem)
    assert asked.text == f"{IMAGE_MARK}{IMAGE_MARK} do these show a cat ?"
    assert [picture.shape for picture in asked.images] == [(8, 8, 3), (8, 8, 3)]
    bad = question.request(sample(more_images=(np.zeros((4, 0, 3), np.uint8),)))
    assert bad == Problem(reason="picture", text="picture 2 of 2: picture is 0x4, it has no pixels")


def test_a_clip_is_shown_and_missed() -> None:
    question = Question(template=f"{CLIP_MARK} does it show {{caption}} ?", image_size=(8, 8))
    asked = question.request(sample(clip=np.zeros((3, 4, 8, 3), np.uint8)))
    assert not isinstance(asked, Problem)
    assert (asked.images, asked.clips[0].shape) == ((), (3, 8, 8, 3))
    missed = question.request(sample())
    assert isinstance(missed, Problem)
    assert missed.reason == "clip"


@pytest.mark.parametrize("template", ["is {caption} there ?", f"{IMAGE_MARK}{IMAGE_MARK} {{caption}}"])
def test_a_template_shows_each_kind_of_medium_once(template: str) -> None:
    with pytest.raises(ConfigError, match=r"template"):
        Question(template=template)
