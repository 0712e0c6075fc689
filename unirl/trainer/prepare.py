"""What comes before the first reward: data, image tokenizer, codes, warm policy, reward model.

Every step leaves a finished thing on disk, under its name only once it is whole, and is skipped when that is
there. So a run that was killed goes on with the step that it was in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from datapipe import ingest
from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.model_folder import IMAGE_TOKENIZER, QWEN_VL, model_type, require_model
from unirl.policies.image_tokenizer import ImageTokenizer
from unirl.trainer.clips import add_frames, require_frames
from unirl.trainer.clone import HasStore, clone_store
from unirl.trainer.model_training import encode_pictures, train_policy, train_reward, train_tokenizer
from unirl.trainer.recipe import Data, Recipe, is_made, model_path
from unirl.trainer.run_directory import new_directory
from unirl.trainer.taken_models import take_model, take_reward, take_tokenizer

__all__ = ["prepare_run", "require_sources"]

log = logging.getLogger("unirl.trainer.prepare")


def require_sources(recipe: Recipe, run: Path) -> None:
    """Refuse a recipe that names a store or a model that is not there, or a clip without motion, before a run
    is recorded.

    What the run has taken already is not asked for again, so that it goes on when the original has moved, or
    when it is started from another folder than that which relative names are of.

    Raises:
        ConfigError: With all models that are missing, or what is wrong with the clip.
        StorageError: If there is no store.
    """
    named = {
        "tokenizer.model": (recipe.tokenizer.model, (IMAGE_TOKENIZER, "janus")),
        "sft.model": (recipe.sft.model, ()),
        "reward.model": (None if recipe.reward is None else recipe.reward.model, (QWEN_VL,)),
    }
    wrong = []
    for setting, (model, kinds) in named.items():
        is_taken = (run / "models" / setting.removesuffix(".model")).is_dir()
        if model is None or is_made(model) or is_taken:
            continue
        try:
            if kinds:
                require_model(Path(model), *kinds)
            else:
                model_type(Path(model))
        except ConfigError as error:
            wrong.append(f"{setting}: {error}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    if recipe.clip is not None:
        require_frames(recipe.clip)
    if isinstance(recipe.data, HasStore):
        source, store = recipe.data.store_path(), run / "store"
        FeatureStore.open(store if store.is_dir() else source)


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


def _once(path: Path, build: Callable[[Path], object]) -> None:
    """Build a directory under another name and rename it; do nothing if it is there."""
    if path.is_dir():
        log.info("%s is there", path)
        return
    with new_directory(path) as partial:
        build(partial)
