from __future__ import annotations

import json
from pathlib import Path

import pytest

from unirl.errors import ConfigError
from unirl.rewards import Question


def test_saved_and_read_again(tmp_path: Path) -> None:
    question = Question(yes=("ja",), no=("nein",), image_size=(64, 32), normalization="vocabulary")
    question.save(tmp_path, training={"accuracy": 0.9})
    assert Question.load(tmp_path) == question
    assert json.loads((tmp_path / "reward.json").read_text())["training"] == {"accuracy": 0.9}


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError, match=r"0 <\|image_pad\|>.*0 \{caption\}.*normalization"):
        Question(template="is it good ?", normalization="sum")  # type: ignore[arg-type]


def test_the_picture_comes_before_the_caption() -> None:
    with pytest.raises(ConfigError, match="before it shows"):
        Question(template="is {caption} in <|image_pad|> ?")


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
