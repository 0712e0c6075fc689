"""The lean forward equals transformers' own, from its own processor and its own positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from unirl.errors import ConfigError, ShapeError
from unirl.rewards.backends.vision import patches
from unirl.rewards.question import Question
from unirl.rewards.question_model import QuestionModel
from unirl.rewards.toy_vlm import VlmConfig, build_model, build_tokenizer

CAPTIONS = ["a red circle", "", "a small green star on the left", "zebra"]


@pytest.fixture
def model(tiny_vlm: Path) -> QuestionModel:
    return QuestionModel.load(tiny_vlm)


@pytest.fixture
def pictures() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)


def test_patches_are_those_of_the_processor(
    model: QuestionModel, tiny_vlm: Path, pictures: np.ndarray
) -> None:
    processor = AutoImageProcessor.from_pretrained(tiny_vlm)
    theirs = processor(list(pictures), return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [[1, 8, 8]] * 4
    torch.testing.assert_close(
        patches(
            pictures[:, None],
            model.model.config.vision_config,
            model.processor.image_mean,
            model.processor.image_std,
        ),
        theirs["pixel_values"],
        atol=1e-6,
        rtol=0,
    )


def test_logits_are_those_of_transformers(model: QuestionModel, tiny_vlm: Path, pictures: np.ndarray) -> None:
    """Loaded with the Auto classes alone: our files need nothing of ours to be read."""
    network = AutoModelForImageTextToText.from_pretrained(tiny_vlm, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_vlm)
    assert tokenizer.padding_side == "left"
    template = Question.load(tiny_vlm).template.replace("<|image_pad|>", "<|image_pad|>" * 16)
    inputs = tokenizer(
        [template.replace("{caption}", text) for text in CAPTIONS], padding=True, return_tensors="pt"
    )
    seen = AutoImageProcessor.from_pretrained(tiny_vlm)(list(pictures), return_tensors="pt")
    with torch.inference_mode():
        theirs = network(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            mm_token_type_ids=(inputs["input_ids"] == network.config.image_token_id).int(),
            **seen,
        ).logits[:, -1]
        ids, mask = model.pad(model.tokenize(CAPTIONS))
        ours = model.logits(model.look(pictures), ids, mask)[:, 0]
    torch.testing.assert_close(ids, inputs["input_ids"])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_row_that_ends_in_padding_is_refused(model: QuestionModel, pictures: np.ndarray) -> None:
    ids, mask = model.pad(model.tokenize(CAPTIONS))
    assert bool(mask[:, -1].all())
    assert not bool(mask[:, 0].all())
    with pytest.raises(ShapeError, match="padded on the left"):
        model.logits(model.look(pictures), ids.flip(1), mask.flip(1))


def test_gradients_are_finite_where_rows_are_padded(model: QuestionModel, pictures: np.ndarray) -> None:
    ids, mask = model.pad(model.tokenize(CAPTIONS))
    model.logits(model.look(pictures), ids, mask).square().sum().backward()
    gradients = [parameter.grad for parameter in model.model.parameters()]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)


def test_where_the_caption_stands(model: QuestionModel) -> None:
    (row,) = model.tokenize(["red circle"])
    words = row[model.num_before : len(row) - model.num_after]
    assert model.tokenizer.convert_ids_to_tokens(words) == ["red", "circle"]


def test_windows_of_uneven_size_go_one_by_one() -> None:
    """A picture of 5 x 4 merged tokens in windows of 2 x 2."""
    question = Question(image_size=(40, 32))
    tokenizer = build_tokenizer(question, CAPTIONS)
    network = build_model(VlmConfig(), tokenizer, question=question, seed=0).eval()
    network.config.vision_config.window_size = network.model.visual.window_size = 16
    network.config.vision_config.fullatt_block_indexes = network.model.visual.fullatt_block_indexes = [1]
    model = QuestionModel(network, tokenizer, question)
    tall = np.random.default_rng(0).integers(0, 256, (2, 40, 32, 3), dtype=np.uint8)
    with torch.inference_mode():
        together, alone = model.look(tall), model.look(tall[1:])
    assert together.shape == (2, 20, 96)
    torch.testing.assert_close(together[1:], alone, atol=1e-5, rtol=0)


def test_a_picture_size_that_no_patch_fits_is_refused() -> None:
    question = Question(image_size=(30, 32))
    tokenizer = build_tokenizer(question, CAPTIONS)
    with pytest.raises(ConfigError, match=r"\(30, 32\) is no multiple of 8"):
        QuestionModel(build_model(VlmConfig(), tokenizer, question=question, seed=0), tokenizer, question)


def test_seed_decides_the_weights_and_the_global_generator_is_left_alone() -> None:
    question = Question()
    tokenizer = build_tokenizer(question, CAPTIONS)
    before = torch.random.get_rng_state()
    first, again, other = (
        build_model(VlmConfig(), tokenizer, question=question, seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_vocabulary_is_the_words_that_were_given() -> None:
    tokenizer = build_tokenizer(Question(), ["a red circle", "a <pad> circle"])
    assert set(tokenizer.get_vocab()) >= {"a", "red", "circle", "yes", "no", "does", "?"}
    assert tokenizer.convert_ids_to_tokens(tokenizer("red zebra")["input_ids"]) == ["red", "<unk>"]


def test_saved_configuration_names_no_attention_of_ours(tiny_vlm: Path) -> None:
    assert "packed" not in (tiny_vlm / "config.json").read_text()
    assert AutoConfig.from_pretrained(tiny_vlm).model_type == "qwen2_5_vl"


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        VlmConfig(width=100)
    with pytest.raises(ConfigError, match="3 heads cannot share 2 heads of keys"):
        VlmConfig(num_heads=3)
