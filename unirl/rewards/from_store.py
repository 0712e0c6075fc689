"""Training of the reward model from the pictures and captions of a feature store."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datapipe.decode import decode_image
from storage import FeatureStore, View
from unirl.errors import ConfigError
from unirl.rewards.pairs import PictureChange, caption_pairs
from unirl.rewards.toy_vlm import VlmConfig
from unirl.rewards.train import RewardReport, train_yes_no

__all__ = ["pictures_of", "train_from_store"]


def train_from_store(
    store: str | Path,
    out_dir: str | Path,
    *,
    where: str | None = None,
    image_size: tuple[int, int] = (32, 32),
    held_out_fraction: float = 0.1,
    steps: int = 400,
    batch_size: int = 64,
    learning_rate: float = 5e-3,
    seed: int = 0,
    augment: PictureChange | None = None,
    corrupt: PictureChange | None = None,
    config: VlmConfig | None = None,
    progress: bool = True,
) -> RewardReport:
    """Train a yes/no reward on the captioned pictures of a store and save it in `out_dir`.

    Captions of the store outside the selected rows give the model their words, and are never used as false
    captions: numbers that a condition holds out must not be learnt as false.

    Args:
        store: Path of the feature store; its newest snapshot is read.
        where: SQL condition over the index, for example "split = 'rl'". None takes every row.
        image_size: Rows and columns to which pictures are scaled.
        held_out_fraction: Share of the selected pictures that is not trained on and gives the report.
        augment: Changes pictures and keeps what they show.
        corrupt: Changes pictures so that they no longer show their caption.

    Raises:
        ConfigError: If the selection leaves nothing to train on or nothing to hold out.
        StorageError: If the store cannot be opened or the condition is no SQL.
        DecodeError: If a blob is no picture.
    """
    opened = FeatureStore.open(store)
    view = opened.select(f"({where or 'true'}) and caption <> '' and bytes is not null")
    captions = view.column("caption").to_pylist()
    num_held_out = round(held_out_fraction * len(view))
    if not 0 < num_held_out < len(view):
        raise ConfigError(
            f"{store}: {len(view)} pictures with a caption where {where or 'true'}, {num_held_out} held out; "
            "wanted some to train on and some to hold out"
        )
    generator = np.random.default_rng([seed, len(view)])
    order = generator.permutation(len(view))
    every = opened.select("caption <> ''").column("caption").to_pylist()
    avoid = set(every) - set(captions)
    unseen, trained = (
        (pictures_of(view[part], image_size), [captions[row] for row in part])
        for part in (order[:num_held_out], order[num_held_out:])
    )
    questions = caption_pairs(*unseen, avoid=avoid)
    return train_yes_no(
        caption_pairs(*trained, avoid=avoid, augment=augment, corrupt=corrupt),
        captions=every,
        image_size=image_size,
        out_dir=out_dir,
        held_out=questions(2 * max(num_held_out, 400), generator),
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        config=config,
        progress=progress,
    )


def pictures_of(view: View, size: tuple[int, int]) -> np.ndarray:
    """Decode the pictures of a view, scaled to (rows, columns): uint8 (N, rows, columns, 3)."""
    return np.stack([decode_image(view.store.blob(int(row)), size=size) for row in view.rows])
