"""A tiny untrained reward model on disk, made once a session, and samples for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPConfig, CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from unirl.rewards.question import Question
from unirl.rewards.question_model import QuestionModel
from unirl.rewards.toy_vlm import VlmConfig, build_model, build_tokenizer
from unirl.types import Sample

CAPTIONS = ("a red circle", "a blue square", "a small green star on the left")
TINY = VlmConfig(
    width=32, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=48, vision_width=32, vision_mlp_width=48
)


def make_samples(num: int, *, seed: int = 0) -> list[Sample]:
    """Noise pictures with captions of different lengths, an empty one and one of unknown words among them."""
    generator = np.random.default_rng(seed)
    captions = [*CAPTIONS, "", "zebra zebra", "circle red a"]
    return [
        Sample(
            key=f"prompt-{row}",
            direction="image",
            caption=captions[row % len(captions)],
            image=generator.integers(0, 256, (32, 32, 3), dtype=np.uint8),
            target=captions[(row + row // 4) % len(captions)],
        )
        for row in range(num)
    ]


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    return make_samples


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reward")
    question = Question()
    tokenizer = build_tokenizer(question, CAPTIONS)
    model = build_model(TINY, tokenizer, question=question, seed=0).eval()
    QuestionModel(model, tokenizer, question).save(directory)
    question.save(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("clip")
    tokenizer = build_tokenizer(Question(), CAPTIONS)
    tokenizer.padding_side = "right"
    config = CLIPConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 12,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        },
        projection_dim=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(
        directory
    )
    return directory
