"""What comes before the first reward: data, image tokenizer, codes, warm policy, reward model.

Every step leaves a finished thing on disk, under its name only once it is whole, and is skipped when that is
there. So a run that was killed goes on with the step that it was in.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from datapipe import Batch, ImageField, Loader, ingest
from storage import FeatureStore, View
from unirl.errors import ConfigError
from unirl.policies.image_tokenizer import ImageTokenizer, pixels_from_uint8, uint8_from_pixels
from unirl.policies.janus import JanusPolicy
from unirl.policies.token_lm import TokenLM
from unirl.policies.vocabulary import JointVocabulary
from unirl.rewards import train_from_store
from unirl.rewards.train_preference import reward_version
from unirl.trainer.clips import add_frames, encode_frames, frame_batches
from unirl.trainer.clone import HasStore, clone_store
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
from unirl.trainer.recipe import (
    Data,
    Recipe,
    RewardTraining,
    SupervisedTraining,
    TokenizerTraining,
    is_made,
    model_path,
)
from unirl.trainer.run_directory import new_directory
from unirl.trainer.sft import SupervisedReport, train_supervised
from unirl.trainer.tokenizer import TokenizerReport, train_image_tokenizer
from unirl.types import Prompt

__all__ = [
    "encode_pictures",
    "prepare_run",
    "require_sources",
    "take_model",
    "take_reward",
    "take_tokenizer",
    "train_policy",
    "train_reward",
    "train_tokenizer",
]

log = logging.getLogger("unirl.trainer.prepare")


def require_sources(recipe: Recipe) -> None:
    """Refuse a recipe that names a store or a model that is not there, before a run is recorded.

    Raises:
        ConfigError: With everything that is missing.
        StorageError: If there is no store.
    """
    named = {
        "tokenizer.model": recipe.tokenizer.model,
        "sft.model": recipe.sft.model,
        "reward.model": None if recipe.reward is None else recipe.reward.model,
    }
    wrong = [
        f"{setting}: {model}: no config.json, so this is no model's folder"
        for setting, model in named.items()
        if model is not None and not is_made(model) and not (Path(model) / "config.json").is_file()
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    if isinstance(recipe.data, HasStore):
        FeatureStore.open(recipe.data.store_path())


def prepare_run(recipe: Recipe, run: Path, *, seed: int) -> None:
    """Make, or find finished, everything that the RL stages of a recipe need under `run`."""
    store, models = run / "store", run / "models"
    _fill_store(recipe.data, store, run / "files", seed=seed)
    start = recipe.models
    if start is not None:
        _once(models / "start", lambda out: start.write(out, seed=seed))
    if recipe.clip is not None:
        add_frames(FeatureStore.open(store), recipe.clip, image_size=recipe.tokenizer.config.image_size)
    _once(
        models / "tokenizer",
        lambda out: (
            train_tokenizer(store, out, where=recipe.tokenizer_rows, training=recipe.tokenizer, seed=seed)
            if recipe.tokenizer.model is None
            else take_tokenizer(model_path(recipe.tokenizer.model, models), out)
        ),
    )
    tokenizer = ImageTokenizer.load(models / "tokenizer")
    encode_pictures(store, tokenizer)
    _once(
        models / "sft",
        lambda out: (
            train_policy(
                store,
                out,
                tokenizer=tokenizer,
                captions=recipe.data.captions(),
                where=recipe.warm_up_rows,
                training=recipe.sft,
                seed=seed,
            )
            if recipe.sft.model is None
            else take_model(model_path(recipe.sft.model, models), out)
        ),
    )
    reward = recipe.reward
    if reward is not None:
        _once(
            models / "reward",
            lambda out: (
                train_reward(
                    store, out, tokenizer=tokenizer, where=recipe.reward_rows, training=reward, seed=seed
                )
                if reward.model is None
                else take_reward(model_path(reward.model, models), out)
            ),
        )


def _fill_store(data: Data, store: Path, files: Path, *, seed: int) -> None:
    """Bring the recipe's data into the run's store: by ingest, or out of a store that is there."""
    if isinstance(data, HasStore):
        clone_store(data.store_path(), store)
        return
    for source in data.sources(files, seed=seed):
        report = ingest(source, store, key_prefix=source.stem)
        log.info(
            "%s: %d rows added to the store, %d were there", source, report.num_added, report.num_skipped
        )


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


def take_model(model: Path, out: Path) -> None:
    """Copy an image tokenizer or a policy into the run, so that the run stays whole when the original goes.

    Raises:
        ConfigError: If there is no model.
    """
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model}: no config.json, so this is no model's folder")
    shutil.copytree(model, out, dirs_exist_ok=True)
    log.info("%s: taken from %s", out.name.strip(".").removesuffix(".partial"), model)


def take_tokenizer(model: Path, out: Path) -> None:
    """Take an image tokenizer into the run: its folder, or the one inside of a Janus.

    Raises:
        ConfigError: If there is no model.
    """
    config = model / "config.json"
    if config.is_file() and json.loads(config.read_text()).get("model_type") == "janus":
        JanusPolicy.load(model).image_tokenizer().save(out)
        log.info("tokenizer: that of the Janus in %s", model)
    else:
        take_model(model, out)


def take_reward(model: Path, out: Path) -> None:
    """Copy a reward model into the run, so that the run stays whole when the original goes.

    Raises:
        ConfigError: If there is no reward model.
    """
    version = reward_version(model)
    shutil.copytree(model, out, dirs_exist_ok=True)
    log.info("reward model: version %d from %s", version, model)


def _once(path: Path, build: Callable[[Path], object]) -> None:
    """Build a directory under another name and rename it; do nothing if it is there."""
    if path.is_dir():
        log.info("%s is there", path)
        return
    with new_directory(path) as partial:
        build(partial)


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
