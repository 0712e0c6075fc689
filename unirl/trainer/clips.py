"""Videos as prompts: frames out of each file, and their codes, as columns that are computed once.

    file (blob) -> frames uint8 (F, H, W, 3) -> codes of the first F - 1 frames, and of the last one

A policy is shown the frames in order; the last one stands where a prompt has its picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datapipe import ClipField, Loader, VideoField
from storage import FeatureStore, View
from unirl.errors import ConfigError
from unirl.policies.image_tokenizer import ImageTokenizer, pixels_from_uint8
from unirl.trainer.prompts import CODES_COLUMN, CONTEXT_COLUMN, FRAMES_COLUMN

__all__ = ["add_frames", "encode_frames", "frame_batches", "require_frames"]

ROWS_AT_A_TIME = 64


def add_frames(store: FeatureStore, clip: ClipField, *, image_size: int) -> FeatureStore:
    """Read one clip out of the middle of every video of a store, and keep its frames as a tensor column.

    Args:
        store: Of videos.
        clip: Length and frames a second. Its size is replaced.
        image_size: Side to which frames are scaled, pixels.

    Returns:
        The store as it then is.

    Raises:
        ConfigError: If a row is no video, or the clip has one frame only.
    """
    is_ingested = "modality" in store.columns
    num_others = len(store.select("modality NOT LIKE 'video%'")) if is_ingested else len(store)
    if num_others:
        raise ConfigError(
            f"{store.url}: {num_others} of {len(store)} rows are no videos, and the recipe reads clips; "
            "leave them out at ingest, or set clip to none"
        )
    require_frames(clip)
    if _has(store, FRAMES_COLUMN):
        return store
    size = (image_size, image_size)
    field = VideoField(clip=ClipField(length_s=clip.length_s, fps=clip.fps, size=size))

    def frames(view: View) -> np.ndarray:
        batches = _in_order(view, fields={"clip": field})
        return np.concatenate([batch["clip"].numpy()[:, 0] for batch in batches])

    store.add_column(
        FRAMES_COLUMN,
        frames,
        dtype=np.uint8,
        shape=(clip.num_frames, *size, 3),
        message=f"{clip.num_frames} frames at {clip.fps} a second",
    )
    return store.refresh()


def require_frames(clip: ClipField) -> None:
    """Refuse a clip that does not show a motion.

    Raises:
        ConfigError: If it has one frame only.
    """
    if clip.num_frames < 2:
        raise ConfigError(
            f"a clip of {clip.length_s} s at {clip.fps} frames a second is one picture; raise one of them"
        )


def encode_frames(store: FeatureStore, tokenizer: ImageTokenizer) -> None:
    """Add the codes of every row's frames: those of the last one as the picture's, the others as context."""
    dtype = np.int16 if tokenizer.num_codes <= 2**15 else np.int32
    length = tokenizer.grid_size**2
    num_frames = store.tensor(FRAMES_COLUMN).shape[0]

    def codes(view: View, which: slice) -> np.ndarray:
        parts = [_codes(batch[FRAMES_COLUMN][:, which], tokenizer) for batch in _frames(view)]
        joined: np.ndarray = np.concatenate(parts).astype(dtype)
        return joined

    about: dict[str, Any] = {"model": "image tokenizer", "model_hash": tokenizer.weights_hash()}
    columns = {
        CONTEXT_COLUMN: (slice(0, -1), (num_frames - 1, length)),
        CODES_COLUMN: (slice(-1, None), (length,)),
    }
    for name, (which, shape) in columns.items():
        if not _has(store, name):

            def values(view: View, which: slice = which, shape: tuple[int, ...] = shape) -> np.ndarray:
                return codes(view, which).reshape(len(view), *shape)

            store.add_column(name, values, dtype=dtype, shape=shape, message="codes of frames", **about)
            store = store.refresh()


def frame_batches(view: View, *, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of single frames, float32 (B, 3, H, W) in [-1, 1], one at random of each clip."""
    loader = Loader(view, batch_size=batch_size, image=None, tensors=(FRAMES_COLUMN,), columns=(), seed=seed)
    generator = np.random.default_rng([seed, 0])
    for batch in loader.forever():
        clips = batch.tensors[FRAMES_COLUMN].numpy()
        picked = generator.integers(clips.shape[1], size=len(clips))
        yield pixels_from_uint8(clips[np.arange(len(clips)), picked])


def _codes(frames: Tensor, tokenizer: ImageTokenizer) -> np.ndarray:
    """Codes (n, F, rows * columns) of frames uint8 (n, F, H, W, 3)."""
    with torch.no_grad():
        codes = tokenizer.encode(pixels_from_uint8(frames.flatten(0, 1).numpy()))
    return codes.cpu().numpy().reshape(*frames.shape[:2], -1)


def _frames(view: View) -> Iterator[dict[str, Tensor]]:
    return _in_order(view, tensors=(FRAMES_COLUMN,))


def _in_order(view: View, **contents: Any) -> Iterator[dict[str, Tensor]]:
    loader = Loader(
        view,
        batch_size=min(ROWS_AT_A_TIME, len(view)),
        image=None,
        columns=(),
        shuffle=False,
        drop_last=False,
        **contents,
    )
    return (dict(batch.tensors) for batch in loader)


def _has(store: FeatureStore, name: str) -> bool:
    return all(name in part.tensors for part in store.snapshot.parts)
