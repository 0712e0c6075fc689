"""The models that RL begins with, trained from a store: image tokenizer, codes, warm policy, reward model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from datapipe import Batch, ImageField, Loader
from storage import FeatureStore, View
from unirl.policies.image_tokenizer import ImageTokenizer, pixels_from_uint8, uint8_from_pixels
from unirl.policies.token_lm import TokenLM
from unirl.policies.vocabulary import JointVocabulary
from unirl.rewards import train_from_store
from unirl.trainer.clips import encode_frames, frame_batches
from unirl.trainer.progress import step_bar
from unirl.trainer.prompts import (
    CODES_COLUMN,
    CONTEXT_COLUMN,
    FRAMES_COLUMN,
    code_columns,
    questions_of,
    select_prompts,
    select_rows,
    text_columns,
)
from unirl.trainer.recipe import RewardTraining, SupervisedTraining, TokenizerTraining
from unirl.trainer.sft import SupervisedReport, train_supervised
from unirl.trainer.tokenizer import TokenizerReport, train_image_tokenizer
from unirl.types import Prompt

__all__ = ["encode_pictures", "train_policy", "train_reward", "train_tokenizer"]

log = logging.getLogger("unirl.trainer.model_training")


def train_tokenizer(
    store: Path, out: Path, *, where: str, training: TokenizerTraining, seed: int
) -> TokenizerReport:
    """Train an image tokenizer on the pictures of a store and save it."""
    view = select_rows(FeatureStore.open(store), where)
    if FRAMES_COLUMN in view.store.tensor_columns:
        batches = frame_batches(view, batch_size=training.batch_size, seed=seed)
    else:
        batches = (_pixels(batch.images) for batch in _pictures(view, training, seed))
    with step_bar("image tokenizer", training.steps) as bar:
        tokenizer, report = train_image_tokenizer(
            batches,
            training.config,
            steps=training.steps,
            learning_rate=training.learning_rate,
            seed=seed,
            on_step=lambda step, loss: bar.update(step + 1, {"loss": loss}),
        )
    log.info("image tokenizer: error %.4f, %d codes used", report.mean_squared_error, report.codes_used)
    tokenizer.save(out)
    return report


def encode_pictures(store: Path, tokenizer: ImageTokenizer, *, batch_size: int = 128) -> None:
    """Add the codes of every picture, or of every frame of a clip, for rows that have none yet.

    Rows without a picture, such as those of a list of prompts, get no codes. A run that was killed goes on
    where it was, and codes of two tokenizers never mix in one column.
    """
    opened = FeatureStore.open(store)
    if FRAMES_COLUMN in opened.tensor_columns:
        encode_frames(opened, tokenizer)
        return
    dtype = np.int16 if tokenizer.num_codes <= 2**15 else np.int32
    pictures = opened.select("bytes IS NOT NULL").rows
    has_codes = CODES_COLUMN in opened.tensor_columns
    if has_codes and opened.tensor(CODES_COLUMN).has(pictures).all():
        return
    is_sparse = len(pictures) < len(opened)

    def codes(view: View) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        is_picture = np.isin(view.rows, pictures, assume_unique=True)
        values = _codes(view[is_picture], tokenizer, dtype, batch_size) if is_picture.any() else empty
        return (is_picture, values) if is_sparse else values

    shape = (tokenizer.grid_size**2,)
    empty = np.empty((0, *shape), dtype)
    opened.add_column(
        CODES_COLUMN,
        codes,
        dtype=dtype,
        shape=shape,
        message="image codes",
        sparse=is_sparse,
        model="image tokenizer",
        model_hash=tokenizer.weights_hash(),
    )


def _codes(view: View, tokenizer: ImageTokenizer, dtype: type[np.integer], batch_size: int) -> np.ndarray:
    """Codes (n, rows * columns) of the pictures of a view."""
    loader = Loader(
        view,
        batch_size=min(batch_size, len(view)),
        image=ImageField(size=(tokenizer.image_size, tokenizer.image_size)),
        columns=(),
        shuffle=False,
        drop_last=False,
    )
    parts = [tokenizer.encode(_pixels(batch.images)).cpu().numpy() for batch in loader]
    joined: np.ndarray = np.concatenate(parts).astype(dtype)
    return joined


def train_policy(
    store: Path,
    out: Path,
    *,
    tokenizer: ImageTokenizer,
    captions: Sequence[str],
    where: str,
    training: SupervisedTraining,
    seed: int,
) -> SupervisedReport:
    """Warm a new policy up on pictures with captions, in both directions, and save it."""
    view = select_prompts(FeatureStore.open(store), where)
    vocabulary = JointVocabulary.from_captions(
        captions, num_codes=tokenizer.num_codes, rows=tokenizer.grid_size, columns=tokenizer.grid_size
    )
    policy = TokenLM.create(training.config, vocabulary, seed=seed)
    with step_bar("supervised warm-up", training.steps) as bar:
        report = train_supervised(
            policy,
            _captioned(view, training, seed),
            steps=training.steps,
            text_fraction=training.text_fraction,
            unconditional_fraction=training.unconditional_fraction,
            learning_rate=training.learning_rate,
            on_step=lambda step, loss: bar.update(step + 1, {"loss": loss}),
        )
    log.info("warm-up: text loss %.3f, image loss %.3f nats a token", report.text_loss, report.image_loss)
    policy.save(out)
    return report


def train_reward(
    store: Path, out: Path, *, tokenizer: ImageTokenizer, where: str, training: RewardTraining, seed: int
) -> None:
    """Train the yes/no reward on pictures as the tokenizer draws them, and save it."""
    report = train_from_store(
        store,
        out,
        where=where,
        image_size=(tokenizer.image_size, tokenizer.image_size),
        steps=training.steps,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        seed=seed,
        augment=_redraw(tokenizer),
        corrupt=_redraw(tokenizer, changed_fraction=0.25),
        config=training.config,
    )
    log.info("reward model: %.1f%% right on unseen pictures", 100 * report.accuracy)


def _pictures(view: View, training: TokenizerTraining, seed: int) -> Iterator[Batch]:
    side = training.config.image_size
    loader = Loader(
        view, batch_size=training.batch_size, image=ImageField(size=(side, side)), columns=(), seed=seed
    )
    return loader.forever()


def _captioned(view: View, training: SupervisedTraining, seed: int) -> Iterator[list[Prompt]]:
    """Endless batches of captions with codes; the pictures themselves are not needed."""
    loader = Loader(
        view,
        batch_size=training.batch_size,
        image=None,
        tensors=code_columns(view),
        columns=text_columns(view),
        seed=seed,
    )
    for batch in loader.forever():
        codes = batch.tensors[CODES_COLUMN].numpy()
        context = batch.tensors[CONTEXT_COLUMN].numpy() if CONTEXT_COLUMN in batch.tensors else None
        yield [
            Prompt(
                key=key,
                direction="text",
                caption=caption,
                codes=codes[i],
                context_codes=None if context is None else context[i],
                question=question or "",
            )
            for i, (key, caption, question) in enumerate(
                zip(batch.keys, batch.columns["caption"], questions_of(batch), strict=True)
            )
        ]


def _redraw(
    tokenizer: ImageTokenizer, *, changed_fraction: float = 0.0
) -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    """Pictures as the tokenizer draws them, with a share of their codes exchanged for random ones."""

    def redraw(pictures: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        codes = tokenizer.encode(pixels_from_uint8(pictures))
        if changed_fraction:
            changed = torch.from_numpy(generator.random(codes.shape) < changed_fraction)
            random = torch.from_numpy(generator.integers(tokenizer.num_codes, size=codes.shape))
            codes = torch.where(changed, random, codes)
        return uint8_from_pixels(tokenizer.decode(codes))

    return redraw


def _pixels(images: Tensor | None) -> Tensor:
    if images is None:
        raise RuntimeError("the loader was asked for pictures and gave none")
    return images
