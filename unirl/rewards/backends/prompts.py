"""Requests as token ids: the chat template, the placeholders of media, rotary positions and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from unirl.errors import ConfigError
from unirl.rewards.backends.base import VlmRequest, distinct_sequences

__all__ = ["Layout", "PaddedPrompts", "Positions", "answer_sequences", "expand", "pad", "prompt_text"]

Layout = tuple[tuple[int, int, tuple[int, int, int]], ...]
"""For each medium of a prompt: its first token's place, tokens a second (0 for pictures), and its grid of
tokens along time, rows and columns."""


def prompt_text(tokenizer: PreTrainedTokenizerBase, request: VlmRequest) -> str:
    """The request inside the model's chat template, if it has one, with the start of the reply."""
    if tokenizer.chat_template is None:
        return request.text + request.reply
    messages = [{"role": "user", "content": request.text}]
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(opened) + request.reply


def answer_sequences(
    tokenizer: PreTrainedTokenizerBase, answers: Sequence[Sequence[str]]
) -> list[list[tuple[int, ...]]]:
    """Token sequences of each answer's spellings, without doubles and without unknown words.

    Raises:
        ConfigError: If the vocabulary has no spelling of an answer.
    """
    unknown, found = tokenizer.unk_token_id, []
    for spellings in answers:
        rows = [tokenizer(spelling, add_special_tokens=False)["input_ids"] for spelling in spellings]
        known = distinct_sequences([row for row in rows if unknown is None or unknown not in row])
        if not known:
            raise ConfigError(
                f"reward model: none of {', '.join(map(repr, spellings))} is in its vocabulary of "
                f"{len(tokenizer)}; give other spellings"
            )
        found.append(known)
    return found


def expand(
    ids: Sequence[int],
    picture_id: int,
    clip_id: int,
    pictures: Sequence[tuple[int, int, int]],
    clips: Sequence[tuple[int, int, int]],
    tokens_per_second: int,
) -> tuple[list[int], Layout]:
    """Repeat each placeholder for every token of its medium.

    Args:
        ids: A tokenized prompt with one placeholder for each medium.
        picture_id: Placeholder of pictures.
        clip_id: Placeholder of clips.
        pictures: Grids of tokens, in order.
        clips: Grids of tokens, in order.
        tokens_per_second: Distance of two frames' rotary positions, one second apart.
    """
    remaining = {picture_id: iter(pictures), clip_id: iter(clips)}
    expanded: list[int] = []
    layout = []
    for token in ids:
        if token not in remaining:
            expanded.append(token)
            continue
        grid = next(remaining[token])
        layout.append((len(expanded), tokens_per_second if token == clip_id else 0, grid))
        expanded += [token] * (grid[0] * grid[1] * grid[2])
    return expanded, tuple(layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedPrompts:
    """B prompts, padded on the left, so that the last column is the last token of every row."""

    ids: np.ndarray
    """int64 (B, S)."""
    mask: np.ndarray
    """bool (B, S), True on real tokens."""
    positions: np.ndarray
    """int64 (3, B, S): rotary positions along time, rows and columns; 0 on padding."""
    next_position: np.ndarray
    """int64 (B,), rotary position of the token that comes next."""


class Positions:
    """Rotary positions of Qwen2.5-VL, worked out once for each layout of media and length.

    Words count on by one in all three; inside a medium that begins at position p, the token at (t, r, c) has
    (p + t * tokens_per_second, p + r, p + c); what follows goes on after the largest of them.

    Source: Qwen2-VL (arXiv 2409.12191), section 2.1, with the absolute time of Qwen2.5-VL (arXiv 2502.13923).
    """

    def __init__(self) -> None:
        self._tables: dict[Layout, tuple[np.ndarray, int]] = {}
        self._known: dict[tuple[Layout, int], tuple[np.ndarray, int]] = {}

    def of(self, layout: Layout, length: int) -> tuple[np.ndarray, int]:
        """Positions int64 (3, length) of a prompt and the one after it."""
        if (layout, length) not in self._known:
            if layout not in self._tables:
                self._tables[layout] = _table(layout)
            table, following = self._tables[layout]
            rest = np.arange(following, following + length - table.shape[1])
            whole = np.concatenate([table, np.broadcast_to(rest, (3, len(rest)))], axis=1)
            self._known[(layout, length)] = (whole, following + len(rest))
        return self._known[(layout, length)]


def _table(layout: Layout) -> tuple[np.ndarray, int]:
    """Positions up to the end of the last medium, and the one after them."""
    parts, place, position = [np.zeros((3, 0), np.int64)], 0, 0
    for start, per_second, grid in layout:
        parts.append(np.broadcast_to(np.arange(position, position + start - place), (3, start - place)))
        position += start - place
        inside = np.indices(grid).reshape(3, -1)
        inside[0] *= per_second
        parts.append(inside + position)
        position += int(inside.max()) + 1
        place = start + inside.shape[1]
    return np.concatenate(parts, axis=1), position


def pad(
    rows: Sequence[Sequence[int]], layouts: Sequence[Layout], positions: Positions, pad_id: Any
) -> PaddedPrompts:
    """Pad B prompts on the left to the longest of them."""
    width = max(map(len, rows))
    ids = np.full((len(rows), width), pad_id or 0, np.int64)
    mask = np.zeros((len(rows), width), bool)
    places = np.zeros((3, len(rows), width), np.int64)
    following = np.zeros(len(rows), np.int64)
    for index, (row, layout) in enumerate(zip(rows, layouts)):
        start = width - len(row)
        ids[index, start:], mask[index, start:] = row, True
        places[:, index, start:], following[index] = positions.of(layout, len(row))
    return PaddedPrompts(ids=ids, mask=mask, positions=places, next_position=following)
