"""The question that a yes/no reward asks about a picture: data, saved beside the model as `reward.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from unirl.errors import ConfigError

__all__ = ["CAPTION", "IMAGE_TOKEN", "REWARD_FILE", "VIDEO_TOKEN", "Question"]

REWARD_FILE = "reward.json"
FORMAT = 1
CAPTION = "{caption}"
IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked, which words count as an answer, and how large a picture the model sees.

    Example: `Question()` asks "does this picture show a red circle ?" for the caption "a red circle".
    """

    template: str = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|> does this picture show {CAPTION} ?"
    """Text with one `<|image_pad|>`, then one `{caption}`. It is repeated for every picture token."""
    yes: tuple[str, ...] = ("yes", "Yes", "YES", " yes", " Yes", " YES")
    """Spellings of yes. Those that are one token of the vocabulary are counted; one must be."""
    no: tuple[str, ...] = ("no", "No", "NO", " no", " No", " NO")
    normalization: Literal["pair", "vocabulary"] = "pair"
    """"pair": p_yes / (p_yes + p_no). "vocabulary": p_yes alone, as in VQAScore (arXiv 2404.01291)."""
    image_size: tuple[int, int] = (32, 32)
    """Rows and columns of the picture that the model sees; others are scaled and padded to it."""
    max_tokens: int = 64
    """Longest question in tokens, picture included. A longer one is not scored, and never cut."""

    def __post_init__(self) -> None:
        problems = []
        for placeholder in (IMAGE_TOKEN, CAPTION):
            if self.template.count(placeholder) != 1:
                problems.append(f"template holds {self.template.count(placeholder)} {placeholder}, wanted 1")
        if self.template.find(CAPTION) < self.template.find(IMAGE_TOKEN):
            problems.append("template asks before it shows: put the picture before {caption}")
        if self.normalization not in ("pair", "vocabulary"):
            problems.append(f'normalization is "{self.normalization}", wanted "pair" or "vocabulary"')
        if min(self.image_size) < 1:
            problems.append(f"image_size is {self.image_size}, wanted two sizes of 1 or more")
        if problems:
            raise ConfigError("question: " + "; ".join(problems))

    def save(self, directory: Path, *, training: Mapping[str, Any] | None = None) -> None:
        """Write `reward.json`: this question and, for whoever reads it later, how the model was trained."""
        document = {"format": FORMAT, "question": asdict(self), "training": dict(training or {})}
        (directory / REWARD_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Question:
        """Read `reward.json` of a model directory.

        Raises:
            ConfigError: If the file is missing, of another format, or holds an unknown field.
        """
        path = directory / REWARD_FILE
        if not path.is_file():
            raise ConfigError(
                f"{directory}: no {REWARD_FILE} here, wanted a directory written by `unirl reward train`"
            )
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("format") != FORMAT:
            raise ConfigError(f"{path}: format {document.get('format')}, this version reads {FORMAT}")
        stored: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in document["question"].items()
        }
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(stored) - set(known))
        if unknown:
            raise ConfigError(f"{path}: unknown field {', '.join(unknown)}; known are {', '.join(known)}")
        return cls(**stored)
