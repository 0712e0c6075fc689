"""Pictures and captions in, next-token logits out, with a gradient: what a yes/no reward is trained through.

The model is transformers' Qwen2.5-VL, called through its public forward. All pictures have one size here, so
whatever depends on sizes only (rotary positions, attention segments) is worked out once and handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from unirl.errors import ConfigError, ShapeError
from unirl.model_folder import QWEN_VL, require_model
from unirl.rewards.backends.prompts import answer_sequences
from unirl.rewards.backends.qwen import TransformersBackend
from unirl.rewards.backends.vision import PACKED_ATTENTION, VisionLayout, patches
from unirl.rewards.question import CAPTION, IMAGE_TOKEN, VIDEO_TOKEN, Question

__all__ = ["QuestionModel"]


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
        if not question.shows_pictures or question.shows_clip:
            raise ConfigError(f"question: a model is trained on pictures alone, without {VIDEO_TOKEN}")
        if any(side % cell for side in question.image_size):
            raise ConfigError(f"question: image_size {question.image_size} is no multiple of {cell}")
        self.model = model
        self.tokenizer = tokenizer
        self.question = question
        rows, columns = (side // vision.patch_size for side in question.image_size)
        self.grid = (1, rows, columns)
        self.num_picture_tokens = self.grid[1] * self.grid[2] // vision.spatial_merge_size**2
        self.picture_id: int = model.config.image_token_id
        answer_sequences(tokenizer, [question.yes, question.no])
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
        self._layout = VisionLayout(self.grid, vision)
        model.set_attn_implementation({"vision_config": PACKED_ATTENTION})

    @classmethod
    def load(cls, directory: str | Path) -> QuestionModel:
        """Read a directory in the format of transformers with a `reward.json`, in float32, in eval mode.

        Raises:
            ConfigError: If a part is missing or is of another kind.
        """
        directory = Path(directory)
        question = Question.load(directory)
        require_model(directory, QWEN_VL)
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        loaded = cls(model, AutoTokenizer.from_pretrained(directory, padding_side="left"), question)
        stored = AutoImageProcessor.from_pretrained(directory)
        loaded.processor.image_mean, loaded.processor.image_std = stored.image_mean, stored.image_std
        return loaded

    def backend(self, *, batch_size: int = 128) -> TransformersBackend:
        """The same network as a backend for scoring; it sees what is trained later, too."""
        return TransformersBackend(
            self.model,
            self.tokenizer,
            mean=self.processor.image_mean,
            deviation=self.processor.image_std,
            batch_size=batch_size,
            max_tokens=self.question.max_tokens,
        )

    def save(self, directory: Path) -> None:
        """Write weights (safetensors), configuration, tokenizer and picture processor; not the question."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        self.processor.save_pretrained(directory)

    @cached_property
    def answers(self) -> tuple[Tensor, Tensor]:
        """Ids of yes and of no that training asks for: the shortest spelling, which must be one token."""
        found = answer_sequences(self.tokenizer, [self.question.yes, self.question.no])
        if any(len(sequences[0]) > 1 for sequences in found):
            raise ConfigError("reward model: training needs a yes and a no that are one token each")
        return torch.tensor(found[0][0][0]), torch.tensor(found[1][0][0])

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

    def normalize_like(self, pictures: np.ndarray) -> None:
        """Take mean and deviation of each colour channel from these pictures, uint8 (U, H, W, 3)."""
        pixels = pictures.reshape(-1, 3).astype(np.float64) / 255
        self.processor.image_mean = pixels.mean(0).tolist()
        self.processor.image_std = np.maximum(pixels.std(0), 1 / 255).tolist()

    def look(self, pictures: np.ndarray) -> Tensor:
        """See each picture once: uint8 (U, H, W, 3) -> float32 (U, N, D), N picture tokens of width D."""
        num = len(pictures)
        vision: Any = self.model.config.vision_config
        output = self.model.model.get_image_features(
            patches(pictures[:, None], vision, self.processor.image_mean, self.processor.image_std),
            torch.tensor([self.grid] * num),
            **self._layout.repeated(num, self.model.device),
        )
        return torch.stack(tuple(output.pooler_output))

    def logits(self, features: Tensor, ids: Tensor, mask: Tensor, *, keep: int = 1) -> Tensor:
        """Read the questions: float32 (B, keep, V), logits after each of the last `keep` tokens (0: all).

        See `hidden` for the arguments.
        """
        logits: Tensor = self.model.lm_head(self.hidden(features, ids, mask)[:, -keep:])
        return logits

    def hidden(self, features: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Read the questions: float32 (B, S, D), hidden states after each token.

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
        output = self.model.model(
            input_ids=ids,
            attention_mask=None if bool(mask.all()) else mask,
            position_ids=positions,
            mm_encoder_outputs={"image": BaseModelOutputWithPooling(pooler_output=seen)},
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

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
