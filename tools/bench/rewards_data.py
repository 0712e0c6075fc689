"""Models and samples for the benchmark of rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from unirl.rewards import Question, VlmConfig
from unirl.rewards.question_model import QuestionModel
from unirl.rewards.toy_vlm import build_model, build_tokenizer
from unirl.types import Sample

__all__ = ["SIZES", "build_reward", "own_forward", "samples"]

CAPTIONS = ("a red circle", "a small green star on the left", "a blue square at the top", "two circles")
SIZES = {
    "toy": VlmConfig(),
    "larger": VlmConfig(width=256, num_layers=4, mlp_width=768, vision_width=128, vision_mlp_width=256),
}


def build_reward(directory: Path, size: str) -> Path:
    """Write an untrained yes/no reward; what it costs does not depend on its weights."""
    question = Question()
    tokenizer = build_tokenizer(question, CAPTIONS)
    model = build_model(SIZES[size], tokenizer, question=question, seed=0).eval()
    QuestionModel(model, tokenizer, question).save(directory)
    question.save(directory)
    return directory


def samples(num: int) -> list[Sample]:
    """Noise pictures that all differ, with captions of different lengths."""
    pictures = np.random.default_rng(0).integers(0, 256, (num, 32, 32, 3), dtype=np.uint8)
    return [
        Sample(
            key=f"sample-{row}",
            direction="image",
            caption=CAPTIONS[row % len(CAPTIONS)],
            image=picture,
            target=CAPTIONS[row % len(CAPTIONS)],
        )
        for row, picture in enumerate(pictures)
    ]


def own_forward(directory: Path, batch: Sequence[Sample]) -> Callable[[], torch.Tensor]:
    """Transformers' own forward for the question about each sample, inputs ready: logits (B, 1, V)."""
    from transformers import AutoImageProcessor, Qwen2_5_VLForConditionalGeneration

    own = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    question = QuestionModel.load(directory)
    ids, mask = question.pad(question.tokenize([sample.caption for sample in batch]))
    processed = AutoImageProcessor.from_pretrained(directory)(
        [Image.fromarray(sample.image) for sample in batch], return_tensors="pt"
    )
    is_picture = ids == question.model.config.image_token_id
    inputs = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "mm_token_type_ids": is_picture.int(),
        "pixel_values": processed["pixel_values"],
        "image_grid_thw": processed["image_grid_thw"],
    }

    @torch.inference_mode()
    def forward() -> torch.Tensor:
        logits: torch.Tensor = own(**inputs, logits_to_keep=1).logits
        return logits

    return forward
