"""Requests made ready for a Qwen2.5-VL: tokens, with a placeholder for every token of media, and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from unirl.rewards.backends.base import VlmRequest
from unirl.rewards.backends.media_size import as_clip, media_problem
from unirl.rewards.backends.prompts import Layout, PaddedPrompts, Positions, expand, pad, prompt_text
from unirl.rewards.backends.vision import Grid

__all__ = ["Prepared", "Preparer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One request, ready for the network."""

    ids: tuple[int, ...]
    """The prompt's tokens, with a placeholder for every token of its media."""
    layout: Layout
    media: tuple[np.ndarray, ...]
    """uint8 (F, H, W, 3) each: pictures and clips in the order of their placeholders."""


class Preparer:
    """Makes requests ready.

    Args:
        tokenizer: With the placeholders of pictures and clips in its vocabulary.
        config: Of the model, as transformers reads it.
        max_tokens: Longest prompt.
        max_pixels: Largest picture.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: Any, *, max_tokens: int, max_pixels: int
    ) -> None:
        self.tokenizer, self.max_tokens, self.max_pixels = tokenizer, max_tokens, max_pixels
        self._picture_id, self._clip_id = config.image_token_id, config.video_token_id
        vision: Any = config.vision_config
        # Plain numbers: looking one up in a configuration of transformers takes as long as a whole grid.
        self._patch: int = vision.patch_size
        self._merge: int = vision.spatial_merge_size
        self._frames: int = vision.temporal_patch_size
        self._per_second: int = vision.tokens_per_second
        self._positions = Positions()

    def prepare(
        self, requests: Sequence[VlmRequest], *, room: int = 0
    ) -> tuple[dict[int, Prepared], dict[int, str]]:
        """Tokenize requests and make their media fit; by index, and problems by index.

        Args:
            requests: B questions.
            room: Tokens that must fit behind the prompt.
        """
        texts = [prompt_text(self.tokenizer, request) for request in requests]
        tokenized = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        prepared: dict[int, Prepared] = {}
        problems: dict[int, str] = {}
        for index, (request, ids) in enumerate(zip(requests, tokenized)):
            found = self._prepared(request, ids, room)
            if isinstance(found, str):
                problems[index] = found
            else:
                prepared[index] = found
        return prepared, problems

    def padded(self, rows: Sequence[Prepared]) -> PaddedPrompts:
        """Pad prompts on the left, with their rotary positions."""
        pad_id = self.tokenizer.pad_token_id
        return pad([row.ids for row in rows], [row.layout for row in rows], self._positions, pad_id)

    def grid(self, clip: np.ndarray) -> Grid:
        """Patches of uint8 (F, H, W, 3) along time, rows and columns."""
        frames, rows, columns = clip.shape[:3]
        return -(-frames // self._frames), rows // self._patch, columns // self._patch

    def _prepared(self, request: VlmRequest, ids: Sequence[int], room: int) -> Prepared | str:
        """A request with its media in order, or why it cannot be asked."""
        picture_id, clip_id = self._picture_id, self._clip_id
        problem = media_problem(request, ids, picture_id, clip_id, max_pixels=self.max_pixels)
        if problem is not None:
            return problem
        cell = self._patch * self._merge
        pictures = [as_clip(picture, cell) for picture in request.images]
        clips = [as_clip(clip, cell) for clip in request.clips]
        expanded, layout = expand(
            ids,
            picture_id,
            clip_id,
            [self._token_grid(picture) for picture in pictures],
            [self._token_grid(clip) for clip in clips],
            self._per_second,
        )
        if len(expanded) + room > self.max_tokens:
            return f"too long: it needs {len(expanded) + room} tokens, the model takes {self.max_tokens}"
        waiting = {picture_id: iter(pictures), clip_id: iter(clips)}
        ordered = tuple(next(waiting[token]) for token in ids if token in waiting)
        return Prepared(ids=tuple(expanded), layout=layout, media=ordered)

    def _token_grid(self, clip: np.ndarray) -> Grid:
        time, rows, columns = self.grid(clip)
        return time, rows // self._merge, columns // self._merge
