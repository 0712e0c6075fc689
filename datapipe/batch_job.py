"""How the rows of one batch are read, decoded and put together."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datapipe.collate import Batch, as_tensor, write_pixels
from datapipe.decode.image import DEFAULT_MAX_PIXELS, WHITE, decode_image
from datapipe.errors import DataError, LoaderError, SampleError
from datapipe.pipeline import Job
from storage import TensorColumn, TensorColumnError, View

__all__ = ["BatchSource", "ImageField"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageField:
    """How blobs become pixels."""

    size: tuple[
        int, int
    ]  # (height, width) pixels; others are resized, antialiased bilinear, see decode_image
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
        pixels = None if self._image is None else np.empty((len(rows), 3, *self._image.size), np.float32)
        gathered: dict[str, NDArray[np.generic]] = {}
        parts: list[Callable[[], None]] = []
        if self._tensors:
            parts.append(lambda: gathered.update(self._gather(rows)))
        if self._image is not None and pixels is not None:
            parts.extend(self._decode_parts(rows, keys, pixels, self._image, num_parts))

        def finish() -> Batch:
            return Batch(
                rows=rows,
                keys=keys,
                images=None if pixels is None else as_tensor(pixels),
                tensors={name: as_tensor(gathered[name]) for name in self._tensors},
                columns={name: picked.column(name).to_pylist() for name in self._columns},
            )

        return Job(parts=parts, finish=finish)

    def _gather(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.generic]]:
        return {name: _read_tensor(column, rows) for name, column in self._tensors.items()}

    def _decode_parts(
        self,
        rows: NDArray[np.int64],
        keys: list[str],
        pixels: NDArray[np.float32],
        image: ImageField,
        num_parts: int,
    ) -> Iterable[Callable[[], None]]:
        bounds = np.linspace(0, len(rows), min(num_parts, max(len(rows), 1)) + 1).astype(int)
        for low, high in pairwise(bounds.tolist()):
            yield lambda low=low, high=high: self._decode(rows, keys, pixels, image, low, high)  # type: ignore[misc]

    def _decode(
        self,
        rows: NDArray[np.int64],
        keys: list[str],
        pixels: NDArray[np.float32],
        image: ImageField,
        low: int,
        high: int,
    ) -> None:
        for index in range(low, high):
            row = int(rows[index])
            try:
                decoded = decode_image(
                    self._store.blob(row),
                    size=image.size,
                    background=image.background,
                    max_pixels=image.max_pixels,
                )
            except (DataError, OSError) as error:
                raise SampleError(f"sample {keys[index]!r} (row {row}): {error}") from error
            write_pixels(decoded, pixels[index])


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
