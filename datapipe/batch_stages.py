"""The stages of a loader that work on whole batches: fetch, collate, device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from datapipe.collate import Batch, Tokens, as_images, as_tensor, pad_tokens
from datapipe.device import DeviceCopier
from datapipe.draft import IMAGES, Draft, Piece
from datapipe.fields import BatchContents, ImageField, TextField
from datapipe.joined import JoinedStore, JoinedTensor, RowReader
from datapipe.ring import BufferRing
from storage import (
    CorruptionError,
    FeatureStore,
    MissingShardError,
    StorageError,
    TensorColumn,
    TensorColumnError,
)

__all__ = ["Collate", "Fetch", "ToDevice", "on_device"]


class Fetch:
    """Keys, metadata and tensors of a batch, once; and the blobs of the rows of a piece."""

    def __init__(
        self,
        store: FeatureStore | JoinedStore,
        *,
        columns: RowReader,
        tensors: Mapping[str, TensorColumn | JoinedTensor],
        contents: BatchContents,
        is_staged: bool,
    ) -> None:
        self._store = store
        self._columns = columns
        self._tensors = tensors
        wanted = {name for field in contents.fields.values() for name in field.tensors}
        self._of_fields = {
            name: store.tensor(name) if name in store.tensor_columns else None for name in sorted(wanted)
        }
        self._texts = tuple(contents.texts)
        self._needs_blob, self._needs_picture = contents.needs_blob, contents.image is not None
        self._needs_keys = contents.is_per_sample
        self._is_copied = is_staged

    def __call__(self, piece: Piece) -> Piece:
        with piece.draft.lock:
            if not piece.draft.is_fetched:
                self._describe(piece.drafts)
        if piece.start == 0:
            for name, column in self._tensors.items():
                self._gather(name, column, piece.drafts)
        if self._needs_blob:
            for index in piece.indices():
                try:
                    piece.blobs[index] = self._store.blob(int(piece.draft.rows[index]))
                except (StorageError, OSError) as error:
                    # A field may do without a file, and says itself where it cannot.
                    if self._needs_picture or isinstance(error, (CorruptionError, MissingShardError)):
                        piece.draft.drop(index, "fetch", error)
        for name, held in self._of_fields.items():
            piece.tensors[name] = {}
            if held is not None:
                _read_values(held, piece, piece.tensors[name])
        return piece

    def _describe(self, drafts: list[Draft]) -> None:
        rows = drafts[0].rows if len(drafts) == 1 else np.concatenate([draft.rows for draft in drafts])
        try:
            keys = self._columns.keys(rows) if self._needs_keys else []
            columns = self._columns.values(rows)
        except (StorageError, OSError):
            for draft in drafts:
                self._describe_row_by_row(draft)
            return
        start = 0
        for draft in drafts:
            mine = slice(start, start + len(draft.rows))
            draft.keys = keys[mine]
            draft.columns = {name: values[mine] for name, values in columns.items()}
            self._note_fetched(draft)
            start = mine.stop

    def _describe_row_by_row(self, draft: Draft) -> None:
        """Each row for itself, so that those whose keys or metadata cannot be read are known."""
        self._name_rows(draft)
        draft.columns = {name: [None] * len(draft.rows) for name in self._columns.names}
        for index in range(len(draft.rows)):
            try:
                found = self._columns.values(draft.rows[index : index + 1])
            except (StorageError, OSError) as error:
                draft.drop(index, "fetch", error)
            else:
                for name, values in found.items():
                    draft.columns[name][index] = values[0]
        self._note_fetched(draft)

    def _name_rows(self, draft: Draft) -> None:
        """Keys for what is told of the rows; one that cannot be read makes its row a bad sample."""
        draft.keys = [""] * len(draft.rows)
        for index in range(len(draft.rows)):
            try:
                draft.keys[index] = self._columns.keys(draft.rows[index : index + 1])[0]
            except (StorageError, OSError) as error:
                draft.drop(index, "fetch", error)

    def _note_fetched(self, draft: Draft) -> None:
        draft.token_ids = {name: {} for name in self._texts}
        draft.is_fetched = True

    def _gather(self, name: str, column: TensorColumn | JoinedTensor, drafts: list[Draft]) -> None:
        """One read for several batches, unless that would copy what each of them alone need not copy."""
        if len(drafts) > 1:
            rows = np.concatenate([draft.rows for draft in drafts])
            whole = self._view(column, rows)
            if whole is None and (self._is_copied or not any(_is_consecutive(d.rows) for d in drafts)):
                whole = _gathered(column, rows, drafts[0].ring)
            if whole is not None:
                ends = np.cumsum([len(draft.rows) for draft in drafts])[:-1]
                for draft, part in zip(drafts, np.split(whole, ends)):
                    draft.gathered[name] = part
                return
        for draft in drafts:
            found = self._view(column, draft.rows)
            if found is None:
                found = _gathered(column, draft.rows, draft.ring)
            draft.gathered[name] = self._row_by_row(column, draft) if found is None else found

    def _row_by_row(self, column: TensorColumn | JoinedTensor, draft: Draft) -> NDArray[Any]:
        """Each row for itself, so that those that cannot be read are known."""
        found: NDArray[Any] = draft.ring.lend((len(draft.rows), *column.shape), column.dtype)
        if not draft.keys:
            self._name_rows(draft)
        for index, row in enumerate(draft.rows.tolist()):
            try:
                found[index] = column.row(row)
            except StorageError as error:
                draft.drop(index, "fetch", error)
        return found

    def _view(self, column: TensorColumn | JoinedTensor, rows: NDArray[np.int64]) -> NDArray[Any] | None:
        """Consecutive rows of one shard without a copy; None where there is no such view."""
        if self._is_copied or not _is_consecutive(rows):
            return None
        try:
            return column[int(rows[0]) : int(rows[-1]) + 1]
        except TensorColumnError:
            return None


class Collate:
    """Puts together each batch whose pieces are all done, without the bad samples."""

    def __init__(self, contents: BatchContents, names: RowReader) -> None:
        self._contents = contents
        self._names = names

    def __call__(self, piece: Piece) -> Piece:
        for draft in piece.drafts:
            with draft.lock:
                draft.num_open -= 1
                is_whole = draft.num_open == 0
            if is_whole:
                draft.batch = self._batch(draft)
                piece.collated.append(draft)
        return piece

    def _batch(self, draft: Draft) -> Batch:
        kept = None
        if draft.bad:
            kept = np.array([index for index in range(len(draft.rows)) if index not in draft.bad], np.int64)
        held = self._contents
        arrays = {name: draft.gathered[name] for name in held.tensors}
        arrays |= {name: draft.made.get(name, np.empty((0,))) for name in held.fields}
        return Batch(
            rows=_kept(draft.rows, kept),
            read_keys=self._keys(draft, kept),
            images=None if held.image is None else _images(draft, held.image, kept),
            tensors={name: as_tensor(_kept(array, kept)) for name, array in arrays.items()},
            columns={name: _picked(draft.columns[name], kept) for name in held.columns},
            tokens={name: _tokens(draft, name, made, kept) for name, made in held.texts.items()},
        )

    def _keys(self, draft: Draft, kept: NDArray[np.int64] | None) -> Callable[[], list[str]]:
        if draft.keys:
            return _picked(draft.keys, kept).copy
        return partial(self._names.keys, draft.rows.copy())  # the caller may write to the rows


class ToDevice:
    """Begins to copy each batch that was collated with this piece."""

    def __init__(self, copier: DeviceCopier) -> None:
        self._copier = copier

    def __call__(self, piece: Piece) -> Piece:
        for draft in piece.collated:
            if draft.batch is not None:
                draft.in_flight = self._copier.begin(_tensors_of(draft.batch))
        return piece


def on_device(batch: Batch, tensors: Sequence[Tensor]) -> Batch:
    """The batch with other tensors in the place of its own, in the order of `_tensors_of`."""
    given = iter(tensors)
    return replace(
        batch,
        images=None if batch.images is None else next(given),
        tensors={name: next(given) for name in batch.tensors},
        tokens={
            name: replace(held, ids=next(given), lengths=next(given), mask=next(given))
            for name, held in batch.tokens.items()
        },
    )


def _tensors_of(batch: Batch) -> list[Tensor]:
    images = [] if batch.images is None else [batch.images]
    tokens = [part for held in batch.tokens.values() for part in (held.ids, held.lengths, held.mask)]
    return [*images, *batch.tensors.values(), *tokens]


def _images(draft: Draft, image: ImageField, kept: NDArray[np.int64] | None) -> Tensor:
    is_uint8 = image.pixels == "uint8"
    made = draft.made.get(IMAGES)
    if made is None:
        height, width = draft.size or (0, 0)
        shape = (0, height, width, 3) if is_uint8 else (0, 3, height, width)
        return as_images(np.empty(shape, image.pixels), is_uint8=is_uint8)
    return as_images(_kept(made, kept), is_uint8=is_uint8)


def _tokens(draft: Draft, name: str, text: TextField, kept: NDArray[np.int64] | None) -> Tokens:
    ids = draft.token_ids[name]
    indices = range(len(draft.rows)) if kept is None else kept.tolist()
    return pad_tokens([ids[index] for index in indices], pad_id=text.pad_id, multiple_of=text.multiple_of)


def _kept(array: NDArray[Any], kept: NDArray[np.int64] | None) -> NDArray[Any]:
    """The rows that are not bad, moved to the front of the same memory."""
    if kept is None:
        return array
    array[: len(kept)] = array[kept]
    return array[: len(kept)]


def _picked(values: list[Any], kept: NDArray[np.int64] | None) -> list[Any]:
    return values if kept is None else [values[index] for index in kept.tolist()]


def _is_consecutive(rows: NDArray[np.int64]) -> bool:
    return bool(len(rows)) and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all())


def _gathered(
    column: TensorColumn | JoinedTensor, rows: NDArray[np.int64], ring: BufferRing
) -> NDArray[Any] | None:
    """Rows copied once each; None where one cannot be read."""
    try:
        return column.gather(rows, ring.lend((len(rows), *column.shape), column.dtype))
    except StorageError:
        return None


def _read_values(column: TensorColumn | JoinedTensor, piece: Piece, found: dict[int, NDArray[Any]]) -> None:
    """The values of the rows of a piece that have one, by index, as views of the map."""
    for index in piece.indices():
        rows = piece.draft.rows[index : index + 1]
        try:
            if column.has(rows)[0]:
                found[index] = column[int(rows[0]) : int(rows[0]) + 1][0]
        except (StorageError, OSError) as error:
            piece.draft.drop(index, "fetch", error)
