"""How the rows of one batch are read, decoded and put together."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datapipe.batching import Share
from datapipe.collate import Batch, as_tensor, write_pixels, write_transformed
from datapipe.decode.image import DEFAULT_MAX_PIXELS, WHITE, decode_image
from datapipe.decode.resize import Resample
from datapipe.errors import DataError, LoaderError, SampleError
from datapipe.pipeline import StageCounters, run_pipeline
from datapipe.stages import STALL_S, Pipeline, Stage
from datapipe.transforms import Transform, apply_transforms, sample_generator
from storage import StorageError, TensorColumn, TensorColumnError, View

__all__ = ["BatchSource", "ImageField"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageField:
    """How blobs become pixels."""

    size: tuple[int, int] | None  # (height, width) pixels; others are resized; None keeps each one's own
    resample: Resample = "bilinear"  # filter of the resizing, antialiased by default
    background: tuple[int, int, int] = WHITE  # RGB 0..255 behind transparent pixels
    max_pixels: int = DEFAULT_MAX_PIXELS  # budget read from the header
    transforms: tuple[Transform, ...] = ()  # applied in order after decoding, see datapipe.transforms


class BatchSource:
    """Makes batches from positions in a view. Metadata is held in Arrow memory, not in objects."""

    def __init__(
        self, view: View, *, image: ImageField | None, tensors: Sequence[str], columns: Sequence[str]
    ) -> None:
        store = view.store
        _check_names("column", columns, store.columns)
        _check_names("tensor column", tensors, store.tensor_columns)
        self._store = store
        self._rows: NDArray[np.int64] = np.ascontiguousarray(view.rows, dtype=np.int64)
        self._image = image
        self._tensors = {name: store.tensor(name) for name in tensors}
        self._columns = tuple(columns)
        wanted = list(dict.fromkeys(["key", *columns]))
        self._table: pa.Table = view.to_arrow(wanted).combine_chunks()

    def pipeline(self, *, num_threads: int, prefetch_batches: int, timeout_s: float | None) -> Pipeline:
        """The stages that a batch goes through before it is put together, in `num_threads` pieces."""
        pieces = prefetch_batches * (1 if self._image is None else num_threads)

        def stage(name: str, function: Callable[[_Piece], _Piece]) -> Stage:
            return Stage(
                name=name,
                function=function,
                concurrency=num_threads,
                queue_size=pieces,
                timeout_s=timeout_s,
            )

        stages = [stage("fetch", self._fetch)]
        if self._image is not None:
            stages.append(stage("decode", self._decode))
            if self._image.transforms:
                stages.append(stage("transform", self._transform))
        return Pipeline(stages=tuple(stages), max_in_flight=pieces, watchdog_s=STALL_S)

    def batches(
        self,
        shares: Iterator[Share],
        *,
        seed: int,
        epoch: int,
        pipeline: Pipeline,
        counters: Sequence[StageCounters],
    ) -> Iterator[Batch]:
        """Batches of places in the view, in order. Transforms draw by seed and epoch."""
        num_pieces = 1 if self._image is None else pipeline.stages[0].concurrency
        drafts = (self._draft(share, seed, epoch) for share in shares)
        pieces = ((piece, piece) for draft in drafts for piece in draft.pieces(num_pieces))
        with closing(run_pipeline(pipeline, pieces, counters=counters)) as done:  # type: ignore[type-var]
            for piece in done:
                if piece.is_last:
                    yield self._finish(piece.draft)

    def _draft(self, share: Share, seed: int, epoch: int) -> _Draft:
        picked = self._table.take(pa.array(share.positions))
        keys = picked.column("key").to_pylist()
        size = share.image_size or (None if self._image is None else self._image.size)
        return _Draft(
            rows=self._rows[share.positions], keys=keys, picked=picked, size=size, seed=seed, epoch=epoch
        )

    def _finish(self, draft: _Draft) -> Batch:
        return Batch(
            rows=draft.rows,
            keys=draft.keys,
            images=None if self._image is None else as_tensor(draft.all_pixels()),
            tensors={name: as_tensor(draft.gathered[name]) for name in self._tensors},
            columns={name: draft.picked.column(name).to_pylist() for name in self._columns},
        )

    def _fetch(self, piece: _Piece) -> _Piece:
        draft = piece.draft
        if piece.start == 0:
            draft.gathered = {
                name: _read_tensor(column, draft.rows) for name, column in self._tensors.items()
            }
        if self._image is not None:
            for index in piece.indices():
                try:
                    piece.blobs.append(self._store.blob(int(draft.rows[index])))
                except (StorageError, OSError) as error:
                    raise draft.failure(index, error) from error
        return piece

    def _decode(self, piece: _Piece) -> _Piece:
        draft, image = piece.draft, self._image
        if image is None:
            return piece
        for index, blob in zip(piece.indices(), piece.blobs):
            try:
                pixels = decode_image(
                    blob,
                    size=draft.size,
                    resample=image.resample,
                    background=image.background,
                    max_pixels=image.max_pixels,
                )
                if image.transforms:
                    piece.decoded.append(pixels)
                else:
                    write_pixels(pixels, draft.place(index, (3, *pixels.shape[:2])))
            except (DataError, OSError) as error:
                raise draft.failure(index, error) from error
        piece.blobs.clear()
        return piece

    def _transform(self, piece: _Piece) -> _Piece:
        draft, transforms = piece.draft, () if self._image is None else self._image.transforms
        for index, decoded in zip(piece.indices(), piece.decoded):
            generator = sample_generator(seed=draft.seed, epoch=draft.epoch, key=draft.keys[index])
            try:
                pixels = apply_transforms(as_tensor(decoded.transpose(2, 0, 1)), transforms, generator)
                write_transformed(pixels, draft.place(index, tuple(pixels.shape)))
            except DataError as error:
                raise draft.failure(index, error) from error
        piece.decoded.clear()
        return piece


@dataclass(slots=True)
class _Draft:
    """A batch while it is made."""

    rows: NDArray[np.int64]
    keys: list[str]
    picked: pa.Table
    size: tuple[int, int] | None  # (height, width) that pictures are decoded to
    seed: int
    epoch: int
    pixels: NDArray[np.float32] | None = None
    gathered: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def place(self, index: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Where the pixels of a row go; the first one that is finished sets the shape of the batch."""
        with self.lock:
            if self.pixels is None:
                self.pixels = np.empty((len(self.rows), *shape), np.float32)
        if self.pixels.shape[1:] != shape:
            raise DataError(
                f"its pixels are {shape}, those of the batch {self.pixels.shape[1:]}; give ImageField a size "
                f"or end the transforms with one that sets it"
            )
        return self.pixels[index]

    def all_pixels(self) -> NDArray[np.float32]:
        """The pixels; of a batch without rows, an empty array."""
        return np.empty((0, 3, *(self.size or (0, 0))), np.float32) if self.pixels is None else self.pixels

    def pieces(self, num_pieces: int) -> Iterator[_Piece]:
        num_rows = len(self.rows)
        bounds = np.linspace(0, num_rows, min(num_pieces, max(num_rows, 1)) + 1).astype(int)
        for start, stop in pairwise(bounds.tolist()):
            yield _Piece(draft=self, start=start, stop=stop, at=start)

    def failure(self, index: int, error: Exception) -> SampleError:
        return SampleError(f"sample {self.keys[index]!r} (row {int(self.rows[index])}): {error}")


@dataclass(slots=True)
class _Piece:
    """Neighbouring rows of a batch, which one worker is at. Its text is the key that the worker is at."""

    draft: _Draft
    start: int
    stop: int
    at: int
    blobs: list[memoryview] = field(default_factory=list)
    decoded: list[NDArray[np.uint8]] = field(default_factory=list)  # for the transforms

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.draft.rows)

    def indices(self) -> Iterator[int]:
        for index in range(self.start, self.stop):
            self.at = index
            yield index

    def __str__(self) -> str:
        return self.draft.keys[self.at] if self.draft.keys else "(none)"


def _read_tensor(column: TensorColumn, rows: NDArray[np.int64]) -> NDArray[np.generic]:
    """A view of the map for consecutive rows of one shard, which copies nothing; else one gather."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        try:
            return column[int(rows[0]) : int(rows[-1]) + 1]
        except TensorColumnError:
            pass  # the rows lie in two shards
    return column.gather(rows)


def _check_names(what: str, names: Sequence[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise LoaderError(f"the store has no {what} {name!r}; it has {sorted(known)}{hint}")
