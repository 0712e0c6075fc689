"""Pictures and captions in, next-token logits out: what scoring and training have in common.

The model is transformers' Qwen2.5-VL, called through its public forward. All pictures have one size here, so
whatever depends on sizes only (rotary positions, attention segments) is worked out once and handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from unirl.errors import ConfigError, ShapeError
from unirl.rewards.question import CAPTION, IMAGE_TOKEN, Question

__all__ = ["QuestionModel"]

PACKED_ATTENTION = "unirl_packed_flash"


class QuestionModel:
    """A Qwen2.5-VL with its tokenizer and its question.

    Args:
        model: The network; its vision attention is switched to the packed form below.
        tokenizer: Pads on the left, so that the last column is the last real token of every row.
        question: What is asked.

    Raises:
        ConfigError: If the picture size does not fit the patches, the vocabulary has no yes or no, or the
            question is longer than its own limit.
    """

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        question: Question,
    ) -> None:
        vision: Any = model.config.vision_config
        cell = vision.patch_size * vision.spatial_merge_size
        if any(side % cell for side in question.image_size):
            raise ConfigError(f"question: image_size {question.image_size} is no multiple of {cell}")
        self.model = model
        self.tokenizer = tokenizer
        self.question = question
        self.grid = (1, *(side // vision.patch_size for side in question.image_size))
        self.num_picture_tokens = self.grid[1] * self.grid[2] // vision.spatial_merge_size**2
        self.picture_id: int = model.config.image_token_id
        self.yes_ids = self._answer_ids("yes", question.yes)
        self.no_ids = self._answer_ids("no", question.no)
        self.processor = _picture_processor(question, vision)
        before, after = question.template.split(CAPTION)
        self.num_before = self._count(before) + self.num_picture_tokens - 1
        """Tokens ahead of the caption."""
        self.num_after = self._count(after)
        shortest = self.num_before + self.num_after
        if shortest > question.max_tokens:
            raise ConfigError(
                f"question: max_tokens is {question.max_tokens}, a question with no caption needs {shortest}"
            )
        self._positions = self._question_positions()
        self._layout = _VisionLayout(self.grid, vision)
        if self._layout.is_even:
            model.set_attn_implementation({"vision_config": PACKED_ATTENTION})

    @classmethod
    def load(cls, directory: str | Path) -> QuestionModel:
        """Read a directory in the format of transformers with a `reward.json`, in float32, in eval mode.

        Raises:
            ConfigError: If a part is missing or is of another kind.
        """
        directory = Path(directory)
        question = Question.load(directory)
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        loaded = cls(model, AutoTokenizer.from_pretrained(directory, padding_side="left"), question)
        stored = AutoImageProcessor.from_pretrained(directory)
        loaded.processor.image_mean, loaded.processor.image_std = stored.image_mean, stored.image_std
        return loaded

    def save(self, directory: Path) -> None:
        """Write weights (safetensors), configuration, tokenizer and picture processor; not the question."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        self.processor.save_pretrained(directory)

    def tokenize(self, captions: Sequence[str]) -> list[list[int]]:
        """Ask about each caption: token ids with the picture's placeholders in place, no padding."""
        template = self.question.template.replace(IMAGE_TOKEN, IMAGE_TOKEN * self.num_picture_tokens)
        texts = [template.replace(CAPTION, caption) for caption in captions]
        return [] if not texts else list(self.tokenizer(texts, add_special_tokens=False)["input_ids"])

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Pad on the left: ids int64 (B, S) and mask bool (B, S), True on real tokens."""
        width = max(map(len, rows))
        ids = np.full((len(rows), width), self.tokenizer.pad_token_id, np.int64)
        mask = np.zeros((len(rows), width), bool)
        for index, row in enumerate(rows):
            ids[index, width - len(row) :] = row
            mask[index, width - len(row) :] = True
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def patches(self, pictures: np.ndarray) -> Tensor:
        """Cut uint8 (U, H, W, 3) into float32 (U * patches, values), as Qwen2VLImageProcessor does.

        Patches are ordered by the merged token that they belong to; the values of a patch are channel, frame
        (one picture repeated), row, column.
        """
        vision: Any = self.model.config.vision_config
        merge, side = vision.spatial_merge_size, vision.patch_size
        mean, std = torch.tensor([self.processor.image_mean, self.processor.image_std]) * 255
        pixels = (torch.from_numpy(pictures).float() - mean) / std
        rows, columns = self.grid[1] // merge, self.grid[2] // merge
        cells = pixels.view(len(pictures), rows, merge, side, columns, merge, side, 3)
        cells = cells.permute(0, 1, 4, 2, 5, 7, 3, 6).unsqueeze(6)
        frames = vision.temporal_patch_size
        return cells.expand(*cells.shape[:6], frames, side, side).reshape(-1, 3 * frames * side * side)

    def normalize_like(self, pictures: np.ndarray) -> None:
        """Take mean and deviation of each colour channel from these pictures, uint8 (U, H, W, 3)."""
        pixels = pictures.reshape(-1, 3).astype(np.float64) / 255
        self.processor.image_mean = pixels.mean(0).tolist()
        self.processor.image_std = np.maximum(pixels.std(0), 1 / 255).tolist()

    def look(self, pictures: np.ndarray) -> Tensor:
        """See each picture once: uint8 (U, H, W, 3) -> float32 (U, N, D), N picture tokens of width D."""
        num = len(pictures)
        output = self.model.model.get_image_features(
            self.patches(pictures), torch.tensor([self.grid] * num), **self._layout.repeated(num)
        )
        return torch.stack(tuple(output.pooler_output))

    def logits(self, features: Tensor, ids: Tensor, mask: Tensor, *, keep: int = 1) -> Tensor:
        """Read the questions: float32 (B, keep, V), logits after each of the last `keep` tokens (0: all).

        Args:
            features: Float32 (B, N, D) from `look`, one picture for each row.
            ids: Int64 (B, S), padded on the left.
            mask: Bool (B, S), True on real tokens.

        Raises:
            ShapeError: If a row does not end in a real token, so that the last column is not its last token.
        """
        if not bool(mask[:, -1].all()):
            raise ShapeError("questions must be padded on the left; a row ends in padding")
        positions = self._positions[:, (mask.cumsum(1) - 1).clamp(min=0)]
        seen: Any = (features.flatten(0, 1),)
        output = self.model(
            input_ids=ids,
            attention_mask=None if bool(mask.all()) else mask,
            position_ids=positions,
            mm_encoder_outputs={"image": BaseModelOutputWithPooling(pooler_output=seen)},
            logits_to_keep=keep,
            use_cache=False,
        )
        logits: Tensor = output.logits
        return logits

    def _answer_ids(self, answer: str, spellings: Sequence[str]) -> Tensor:
        """Ids int64 (n,) of the spellings that are one known token each, without doubles."""
        found = [self.tokenizer(spelling, add_special_tokens=False)["input_ids"] for spelling in spellings]
        unknown = self.tokenizer.unk_token_id
        ids = sorted({row[0] for row in found if len(row) == 1 and row[0] != unknown})
        if not ids:
            raise ConfigError(
                f"reward model: none of {', '.join(map(repr, spellings))} is one token of its vocabulary of "
                f'{len(self.tokenizer)}; set the spellings of "{answer}" in reward.json'
            )
        return torch.tensor(ids)

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _question_positions(self) -> Tensor:
        """Rotary positions int64 (3, max_tokens): the picture stands at one place in every question."""
        shortest = self.tokenize([""])[0]
        ids = torch.tensor([shortest + shortest[-1:] * (self.question.max_tokens - len(shortest))])
        is_picture = ids.eq(self.picture_id).int()
        positions, _ = self.model.model.get_rope_index(ids, is_picture, torch.tensor([self.grid]))
        table: Tensor = positions[:, 0]
        return table


class _VisionLayout:
    """What the vision tower derives from one picture's grid, made once and repeated for a batch."""

    def __init__(self, grid: tuple[int, ...], vision: Any) -> None:
        one = torch.tensor([grid])
        self.positions = get_vision_position_ids(one, vision.spatial_merge_size)
        self.window_index, window_ends = get_vision_window_index(
            one, vision.spatial_merge_size, vision.window_size, vision.patch_size
        )
        windows = window_ends.diff()
        self.window = int(windows[0])
        self.is_even = bool((windows == self.window).all())
        self.num_patches = len(self.positions)

    def repeated(self, num: int) -> dict[str, Tensor | int]:
        """Arguments of `get_image_features` for `num` pictures; none where windows are uneven."""
        if not self.is_even:
            return {}
        size, total = self.num_patches, self.num_patches * num
        offsets = torch.arange(num)[:, None] * len(self.window_index)
        return {
            "image_position_ids": self.positions.repeat(num, 1),
            "image_cu_seqlens": torch.arange(0, total + 1, size, dtype=torch.int32),
            "image_max_seqlen": size,
            "image_window_index": (self.window_index + offsets).flatten(),
            "image_cu_window_seqlens": torch.arange(0, total + 1, self.window, dtype=torch.int32),
            "image_max_window_seqlen": self.window,
        }


def _picture_processor(question: Question, vision: Any) -> Qwen2VLImageProcessorPil:
    """The processor that goes with the model on disk; `patches` gives what it would give."""
    num_pixels = question.image_size[0] * question.image_size[1]
    return Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        size={"shortest_edge": num_pixels, "longest_edge": num_pixels},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def _packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention inside equal segments of `max_length_q` patches, all at once.

    (1, heads, U * n, d) -> (1, U * n, heads, d). transformers' own loop calls the kernel once a segment; it
    hands whole segments only to implementations whose name says "flash".
    """
    query, key, value = (
        states[0].unflatten(1, (-1, max_length_q)).transpose(0, 1) for states in (query, key, value)
    )
    mixed = scaled_dot_product_attention(query, key, value, scale=scaling)
    return mixed.transpose(1, 2).flatten(0, 1).unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
