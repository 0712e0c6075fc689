"""Samples from files into the store, and batches out of it.

`Loader`, `Batch` and what a loader is told are loaded on first use, because batches are torch tensors. Beside
them only the resizing of pictures imports torch, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datapipe.buckets import TokenBuckets
from datapipe.errors import (
    DataError,
    DecodeError,
    LoaderError,
    MissingExtraError,
    SampleError,
    SourceError,
    StageError,
    StoreBusyError,
    WorkerError,
)
from datapipe.ingest import ingest
from datapipe.mixture import Mixture, MixtureSource, curriculum
from datapipe.order import BlockShuffle
from datapipe.pixel_buckets import PixelBuckets
from datapipe.report import BadFractionError, IngestReport
from datapipe.retry import retry
from datapipe.sampling import FixedLength, FullShuffle, WithReplacement
from datapipe.stages import StageOptions
from datapipe.video_clips import ClipField, VideoField

if TYPE_CHECKING:
    from datapipe.collate import Batch
    from datapipe.fields import ImageField, TextField
    from datapipe.loader import Loader

__all__ = [
    "BadFractionError",
    "Batch",
    "BlockShuffle",
    "ClipField",
    "DataError",
    "DecodeError",
    "FixedLength",
    "FullShuffle",
    "ImageField",
    "IngestReport",
    "Loader",
    "LoaderError",
    "MissingExtraError",
    "Mixture",
    "MixtureSource",
    "PixelBuckets",
    "SampleError",
    "SourceError",
    "StageError",
    "StageOptions",
    "StoreBusyError",
    "TextField",
    "TokenBuckets",
    "VideoField",
    "WithReplacement",
    "WorkerError",
    "curriculum",
    "ingest",
    "retry",
]

_WITH_TORCH = frozenset({"Batch", "ImageField", "Loader", "TextField"})


def __getattr__(name: str) -> object:
    if name in _WITH_TORCH:
        from datapipe import loader

        return getattr(loader, name)
    raise AttributeError(f"module 'datapipe' has no attribute {name!r}")
