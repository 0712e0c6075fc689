"""How the rows of one batch are read, decoded and put together."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datapipe.collate import Batch, as_tensor, write_pixels
from datapipe.decode.image import DEFAULT_MAX_PIXELS, WHITE, decode_image
from datapipe.decode.resize import Resample
from datapipe.errors import DataError, LoaderError, SampleError
from datapipe.pipeline import Job
from storage import FeatureStore, TensorColumn, TensorColumnError, View

__all__ = ["BatchSource", "ImageField"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageField:
    """How blobs become pixels."""

    size: tuple[int, int]  # (height, width) pixels; others are resized, see decode_image
    resample: Resample = "bilinear"  # filter of the resizing, antialiased by default
    background: tuple[int, int, int] = WHITE  # RGB 0..255 behind transparent pixels
    max_pixels: int = DEFAULT_MAX_PIXELS  # budget read from the header


class BatchSource:
    """Makes the job of a batch from positions in a view. Metadata is held in Arrow memory, not in objects."""

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

    def job(self, positions: NDArray[np.int64], *, num_parts: int) -> Job[Batch]:
        """Plan one batch.

        Args:
            positions: int64 (B,), places in the view.
            num_parts: Pieces that the decoding is cut into.
        """
        rows = self._rows[positions]
        picked = self._table.take(pa.array(positions))
        keys: list[str] = picked.column("key").to_pylist()
        gathered: dict[str, NDArray[np.generic]] = {}
        parts: list[Callable[[], None]] = []
        if self._tensors:
            parts.append(lambda: gathered.update(self._gather(rows)))
        decoding = None if self._image is None else _Decoding(self._store, rows, keys, self._image)
        if decoding is not None:
            parts.extend(decoding.parts(num_parts))

        def finish() -> Batch:
            return Batch(
                rows=rows,
                keys=keys,
                images=None if decoding is None else as_tensor(decoding.pixels),
                tensors={name: as_tensor(gathered[name]) for name in self._tensors},
                columns={name: picked.column(name).to_pylist() for name in self._columns},
            )

        def describe() -> str:
            busy = [] if decoding is None else sorted(decoding.busy.values())
            return (
                f"sample {', '.join(busy)} is being decoded"
                if busy
                else f"tensors of {keys[:1]} are being read"
            )

        return Job(parts=parts, finish=finish, describe=describe)

    def _gather(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.generic]]:
        return {name: _read_tensor(column, rows) for name, column in self._tensors.items()}


class _Decoding:
    """The pictures of one batch, decoded in pieces into one array."""

    def __init__(
        self, store: FeatureStore, rows: NDArray[np.int64], keys: list[str], image: ImageField
    ) -> None:
        self.pixels = np.empty((len(rows), 3, *image.size), np.float32)
        self.busy: dict[int, str] = {}  # first row of a running piece -> the key that it is at
        self._store, self._rows, self._keys, self._image = store, rows, keys, image

    def parts(self, num_parts: int) -> Iterator[Callable[[], None]]:
        num_rows = len(self._rows)
        bounds = np.linspace(0, num_rows, min(num_parts, max(num_rows, 1)) + 1).astype(int)
        for low, high in pairwise(bounds.tolist()):
            yield partial(self._decode, low, high)

    def _decode(self, low: int, high: int) -> None:
        for index in range(low, high):
            self.busy[low] = self._keys[index]
            write_pixels(self._decode_one(index), self.pixels[index])
        self.busy.pop(low, None)

    def _decode_one(self, index: int) -> NDArray[np.uint8]:
        row, image = int(self._rows[index]), self._image
        try:
            return decode_image(
                self._store.blob(row),
                size=image.size,
                resample=image.resample,
                background=image.background,
                max_pixels=image.max_pixels,
            )
        except (DataError, OSError) as error:
            raise SampleError(f"sample {self._keys[index]!r} (row {row}): {error}") from error


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
