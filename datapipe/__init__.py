"""Samples from files into the store, and batches out of it.

All names are loaded on first use, so that importing the package costs next to nothing. Batches are torch
tensors; beside them only the resizing of pictures imports torch, when it is first used.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from datapipe.buckets import TokenBuckets
    from datapipe.collate import Batch
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
    from datapipe.fields import ImageField, TextField
    from datapipe.ingesting import ingest
    from datapipe.loader import Loader
    from datapipe.mixture import Mixture, MixtureSource, curriculum
    from datapipe.order import BlockShuffle
    from datapipe.pixel_buckets import PixelBuckets
    from datapipe.report import BadFractionError, IngestReport
    from datapipe.retrying import retry
    from datapipe.sampling import FixedLength, FullShuffle, WithReplacement
    from datapipe.stages import StageOptions
    from datapipe.video_clips import ClipField, VideoField

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

_MODULES: Final = {
    "buckets": ("TokenBuckets",),
    "collate": ("Batch",),
    "errors": (
        "DataError",
        "DecodeError",
        "LoaderError",
        "MissingExtraError",
        "SampleError",
        "SourceError",
        "StageError",
        "StoreBusyError",
        "WorkerError",
    ),
    "fields": ("ImageField", "TextField"),
    "ingesting": ("ingest",),
    "loader": ("Loader",),
    "mixture": ("Mixture", "MixtureSource", "curriculum"),
    "order": ("BlockShuffle",),
    "pixel_buckets": ("PixelBuckets",),
    "report": ("BadFractionError", "IngestReport"),
    "retrying": ("retry",),
    "sampling": ("FixedLength", "FullShuffle", "WithReplacement"),
    "stages": ("StageOptions",),
    "video_clips": ("ClipField", "VideoField"),
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'datapipe' has no attribute {name!r}")
    # A collection over all that torch holds takes a tenth of a second, and imports set some off.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        found: object = getattr(import_module(f"datapipe.{_MODULE_OF[name]}"), name)
    finally:
        if is_collecting:
            gc.enable()
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
