"""The question that a yes/no reward asks about a picture: data, saved beside the model as `reward.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unirl.errors import ConfigError
from unirl.rewards.backends.base import CLIP_MARK, IMAGE_MARK, VlmRequest
from unirl.rewards.failures import Problem
from unirl.rewards.pictures import fit_picture, picture_problem
from unirl.types import Sample

__all__ = ["CAPTION", "IMAGE_TOKEN", "REWARD_FILE", "VIDEO_TOKEN", "Question", "caption_problem", "media_of"]

REWARD_FILE = "reward.json"
FORMAT = 1
CAPTION = "{caption}"
IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"
_CONTROL = re.compile(r"<\|\w+\|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked, which words count as an answer, and how large a picture the model sees.

    Example: `Question()` asks "does this picture show a red circle ?" for the caption "a red circle".
    """

    template: str = f"{IMAGE_MARK} does this picture show {CAPTION} ?"
    """Text with one `{caption}`, behind an `IMAGE_MARK` for the pictures (all of them, if there are several),
    a `CLIP_MARK` for the clip, or both."""
    yes: tuple[str, ...] = ("yes", "Yes", "YES", " yes", " Yes", " YES")
    """Spellings of yes, of one token or of several. One that the vocabulary holds is needed."""
    no: tuple[str, ...] = ("no", "No", "NO", " no", " No", " NO")
    normalization: Literal["pair", "vocabulary"] = "pair"
    """"pair": p_yes / (p_yes + p_no). "vocabulary": p_yes alone, as in VQAScore (arXiv 2404.01291)."""
    image_size: tuple[int, int] = (32, 32)
    """Rows and columns of the picture that the model sees; others are scaled and padded to it."""
    max_tokens: int = 64
    """Longest question in tokens, picture included. A longer one is not scored, and never cut."""

    def __post_init__(self) -> None:
        problems = []
        if self.template.count(CAPTION) != 1:
            problems.append(f"template holds {self.template.count(CAPTION)} {CAPTION}, wanted 1")
        for token, mark in ((IMAGE_TOKEN, IMAGE_MARK), (VIDEO_TOKEN, CLIP_MARK)):
            if self.template.count(token) > 1 or self.template.count(token) != self.template.count(mark):
                problems.append(
                    f"template holds {self.template.count(token)} {token}, wanted one inside {mark}, or none"
                )
        places = [self.template.find(token) for token in (IMAGE_TOKEN, VIDEO_TOKEN) if token in self.template]
        if not places:
            problems.append(f"template shows nothing, wanted {IMAGE_MARK} or {CLIP_MARK}")
        elif self.template.find(CAPTION) < max(places):
            problems.append("template asks before it shows: put the picture before {caption}")
        if self.normalization not in ("pair", "vocabulary"):
            problems.append(f'normalization is "{self.normalization}", wanted "pair" or "vocabulary"')
        if min(self.image_size) < 1:
            problems.append(f"image_size is {self.image_size}, wanted two sizes of 1 or more")
        if problems:
            raise ConfigError("question: " + "; ".join(problems))

    @property
    def shows_pictures(self) -> bool:
        """Whether the question is about the sample's pictures."""
        return IMAGE_TOKEN in self.template

    @property
    def shows_clip(self) -> bool:
        """Whether the question is about the sample's clip."""
        return VIDEO_TOKEN in self.template

    def request(self, sample: Sample) -> VlmRequest | Problem:
        """Ask the question about a sample, its media scaled and padded to `image_size`; or say why not."""
        if (found := caption_problem(sample.caption)) is not None:
            return found
        media = media_of(
            sample, pictures=self.shows_pictures, clip=self.shows_clip, image_size=self.image_size
        )
        if isinstance(media, Problem):
            return media
        images, clips = media
        text = self.template.replace(IMAGE_MARK, IMAGE_MARK * len(images))
        text = text.replace(CAPTION, sample.caption)
        return VlmRequest(key=sample.key, text=text, images=images, clips=clips)

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


def caption_problem(caption: str) -> Problem | None:
    """Say why a caption cannot be asked about, or None: its words must not pass for the question's own marks.

    A picture's placeholder, or the end of the user's turn, would change what the model is asked.
    """
    found = _CONTROL.search(caption)
    if found is None:
        return None
    return Problem(reason="placeholder", text=f"the caption holds {found.group()}, a mark of the model's own")


def media_of(
    sample: Sample, *, pictures: bool, clip: bool, image_size: tuple[int, int]
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]] | Problem:
    """The pictures and clips of a sample that a question shows, scaled and padded to (rows, columns).

    Args:
        pictures: Whether the pictures are shown.
        clip: Whether the clip is.
    """
    shown = (sample.image, *sample.more_images) if pictures else ()
    for number, picture in enumerate(shown, start=1):
        if (found := picture_problem(picture)) is not None:
            text = found if len(shown) == 1 else f"picture {number} of {len(shown)}: {found}"
            return Problem(reason="picture", text=text)
    images = tuple(fit_picture(picture, image_size) for picture in shown)
    if not clip:
        return images, ()
    if sample.clip is None or sample.clip.ndim != 4 or not len(sample.clip):
        return Problem(reason="clip", text="the sample has no clip, wanted uint8 (frames, rows, columns, 3)")
    if (found := picture_problem(sample.clip[0])) is not None:
        return Problem(reason="clip", text=f"clip: {found}")
    return images, (np.stack([fit_picture(frame, image_size) for frame in sample.clip]),)
