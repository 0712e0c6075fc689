"""Prompts out of the data store, in an order that any number of ranks shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from datapipe import Batch, ImageField, Loader
from storage import FeatureStore, View
from unirl.errors import ConfigError
from unirl.policies.image_tokenizer import uint8_from_pixels
from unirl.types import Direction, Prompt

__all__ = [
    "PromptSource",
    "all_prompts",
    "code_columns",
    "prompts_from_batch",
    "questions_of",
    "select_prompts",
    "select_rows",
    "text_columns",
]

CODES_COLUMN = "image_codes"
CONTEXT_COLUMN = "context_codes"
"""Optional: codes (N, rows * columns) of the pictures, or the frames of a clip, that a prompt shows first."""
QUESTION_COLUMN = "question"
"""Optional: what is asked about the picture; the caption is the answer."""
FRAMES_COLUMN = "frames"
"""Optional: uint8 (N + 1, H, W, 3), a clip; its last frame is the prompt's picture, the others come first."""


def select_prompts(store: FeatureStore, condition: str) -> View:
    """Return the rows that a stage trains on; without codes, or without rows, say what is missing."""
    if CODES_COLUMN not in store.tensor_columns:
        raise ConfigError(
            f"{store.url}: no tensor column {CODES_COLUMN!r}; run `unirl tokenizer encode` first"
        )
    return select_rows(store, condition)


def select_rows(store: FeatureStore, condition: str) -> View:
    """Return the rows that fit a condition; none at all is an error."""
    view = store.select(condition)
    if not len(view):
        raise ConfigError(f"{store.url}: no row where {condition}; see `unirl info {store.url}`")
    return view


def prompts_from_batch(batch: Batch, direction: Direction) -> list[Prompt]:
    """Turn a batch with captions into prompts; those to be answered with text need pictures and codes."""
    frames = batch.tensors[FRAMES_COLUMN].numpy() if FRAMES_COLUMN in batch.tensors else None
    pictures = None if batch.images is None else uint8_from_pixels(batch.images)
    if frames is not None:
        pictures = frames[:, -1]
    if pictures is None and direction == "text":
        raise ConfigError("prompts need pictures; give the loader an image field")
    codes = batch.tensors[CODES_COLUMN].numpy() if CODES_COLUMN in batch.tensors else None
    context = batch.tensors[CONTEXT_COLUMN].numpy() if CONTEXT_COLUMN in batch.tensors else None
    _require_captions(batch)
    texts = zip(batch.keys, batch.columns["caption"], questions_of(batch), strict=True)
    return [
        Prompt(
            key=key,
            direction=direction,
            caption=caption,
            codes=None if codes is None else codes[i],
            image=None if pictures is None else pictures[i],
            context_codes=None if context is None else context[i],
            context_images=None if frames is None else frames[i, :-1],
            question=question or "",
        )
        for i, (key, caption, question) in enumerate(texts)
    ]


def _require_captions(batch: Batch) -> None:
    """A caption is what a drawing is asked for, or the answer that a text is to find."""
    captions = zip(batch.keys, batch.columns["caption"], strict=True)
    without = [key for key, caption in captions if caption is None]
    if without:
        raise ConfigError(
            f"{without[0]}: the row has no caption, nor have {len(without) - 1} others of its batch; leave "
            'such rows out of the stage by `prompts = "caption IS NOT NULL"`'
        )


def code_columns(view: View) -> tuple[str, ...]:
    """Tensor columns that prompts are made of: codes, and those of a context where the store has them."""
    has_context = CONTEXT_COLUMN in view.store.tensor_columns
    return (CODES_COLUMN, CONTEXT_COLUMN) if has_context else (CODES_COLUMN,)


def text_columns(view: View) -> tuple[str, ...]:
    """Text columns that prompts are made of: captions, and questions where the store has them."""
    return ("caption", QUESTION_COLUMN) if QUESTION_COLUMN in view.store.columns else ("caption",)


def questions_of(batch: Batch) -> Sequence[str | None]:
    """The question of each row; None without one."""
    if QUESTION_COLUMN not in batch.columns:
        return [None] * len(batch.keys)
    questions: Sequence[str | None] = batch.columns[QUESTION_COLUMN]
    return questions


def all_prompts(view: View, direction: Direction, *, image_size: int) -> list[Prompt]:
    """Every row of a view as a prompt, in the view's order."""
    loader = _loader(
        view, direction, image_size, batch_size=min(len(view), 256), shuffle=False, drop_last=False
    )
    return [prompt for batch in loader for prompt in prompts_from_batch(batch, direction)]


class PromptSource:
    """An endless stream of this rank's share of each step's prompts. Its state is what was handed out."""

    def __init__(
        self,
        view: View,
        direction: Direction,
        *,
        image_size: int,
        prompts_per_step: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._direction = direction
        self._loader = _loader(
            view,
            direction,
            image_size,
            batch_size=prompts_per_step,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        self._batches: Iterator[Batch] | None = None

    def next(self) -> list[Prompt]:
        """This rank's prompts of the next step."""
        if self._batches is None:
            self._batches = self._loader.forever()
        return prompts_from_batch(next(self._batches), self._direction)

    def state_dict(self) -> dict[str, int]:
        """A few integers; they hold at any number of ranks."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the last prompts that were handed out when the state was taken."""
        self._batches = None
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """Stop the threads that read ahead."""
        self._batches = None


def _loader(view: View, direction: Direction, image_size: int, **options: Any) -> Loader:
    """Pictures are left out where they are not needed and some row has none, as in a list of prompts."""
    is_shown = direction == "text" or view.column("bytes").null_count == 0
    has_frames = FRAMES_COLUMN in view.store.tensor_columns
    tensors = code_columns(view) if is_shown else ()
    return Loader(
        view,
        image=ImageField(size=(image_size, image_size)) if is_shown and not has_frames else None,
        tensors=(*tensors, FRAMES_COLUMN) if has_frames else tensors,
        columns=text_columns(view),
        **options,
    )
