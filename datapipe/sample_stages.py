"""The stages of a loader that work on one sample after the other: decode, transform, tokenize."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datapipe.collate import as_tensor, write_pixels
from datapipe.decode.image import decode_image
from datapipe.draft import IMAGES, Draft, Piece
from datapipe.errors import DataError
from datapipe.fields import Field, ImageField, RawSample, TextField
from datapipe.stages import check_function_travels
from datapipe.transforms import Transform, apply_transforms, sample_generator, sample_seed

__all__ = [
    "DecodeSample",
    "DecodeSamples",
    "TokenizeSample",
    "TokenizeSamples",
    "TransformSample",
    "TransformSamples",
    "check_parts_travel",
    "decode_function",
]

_WIDEST: Final = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}
"""Bytes of the widest numbers of each kind that a tensor can hold."""
_LARGEST_ID: Final = 2**63 - 1


class _SamplesOfPiece:
    name: str

    def indices(self, piece: Piece) -> Iterator[int]:
        return piece.indices()

    def key(self, piece: Piece, index: int) -> str:
        return piece.draft.keys[index]

    def drop(self, piece: Piece, index: int, error: Exception) -> None:
        piece.draft.drop(index, self.name, error)


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A row to its pixels, uint8 (H, W, 3), and to what the fields make of it; by name."""

    image: ImageField | None
    fields: Mapping[str, Field]

    def __call__(
        self, sample: tuple[RawSample, tuple[int, int] | None, NDArray[np.uint8] | None]
    ) -> dict[str, NDArray[Any]]:
        raw, size, out = sample
        made: dict[str, NDArray[Any]] = {}
        if self.image is not None and raw.blob is not None:
            made[IMAGES] = decode_image(
                raw.blob,
                size=size,
                resample=self.image.resample,
                background=self.image.background,
                max_pixels=self.image.max_pixels,
                out=out,
            )
        for name, field in self.fields.items():
            found = np.asarray(field.read(raw))
            if found.dtype.kind not in "biufc" or found.dtype.itemsize > _WIDEST[found.dtype.kind]:
                raise DataError(
                    f"the field {name!r} gave {found.dtype}{found.shape}, wanted an array of numbers "
                    f"of at most 64 bits"
                )
            made[name] = found.astype(found.dtype.newbyteorder("="), copy=False)
        return made


class DecodeSamples(_SamplesOfPiece):
    """Pictures go to their place in the batch, or wait for the transforms."""

    name = "decode"

    def __init__(self, image: ImageField | None, fields: Mapping[str, Field], *, is_sent: bool) -> None:
        self._image = image
        self._tensors = {name for field in fields.values() for name in field.tensors}
        self._columns = {name for field in fields.values() for name in field.columns}
        self._has_fields = bool(fields)
        self._is_sent = is_sent
        self._is_direct = (
            image is not None and image.pixels == "uint8" and not image.transforms and not is_sent
        )

    def take(
        self, piece: Piece, index: int
    ) -> tuple[RawSample, tuple[int, int] | None, NDArray[np.uint8] | None]:
        draft, blob = piece.draft, piece.blobs.pop(index, None)
        key = draft.keys[index]
        raw = RawSample(
            key=key,
            row=int(draft.rows[index]),
            blob=bytes(blob) if self._is_sent and blob is not None else blob,
            columns={name: draft.columns[name][index] for name in self._columns},
            tensors={name: piece.tensors[name].get(index) for name in self._tensors},
            seed=sample_seed(seed=draft.seed, epoch=draft.epoch, key=key) if self._has_fields else 0,
        )
        return raw, draft.size, self._place(draft, index)

    def put(self, piece: Piece, index: int, result: dict[str, NDArray[Any]]) -> None:
        placed = self._place(piece.draft, index)
        for name, array in result.items():
            if name == IMAGES and placed is not None and np.may_share_memory(array, placed):
                continue  # it is there already
            if name != IMAGES or self._image is None:
                piece.draft.place(name, index, array.shape, array.dtype)[...] = array
            elif self._image.transforms:
                piece.pixels[index] = array
            elif self._image.pixels == "uint8":
                piece.draft.place(IMAGES, index, array.shape, np.uint8)[...] = array
            else:
                write_pixels(array, piece.draft.place(IMAGES, index, (3, *array.shape[:2]), np.float32))

    def _place(self, draft: Draft, index: int) -> NDArray[np.uint8] | None:
        """Where a picture of known size is decoded to right away."""
        if not self._is_direct or draft.size is None:
            return None
        return draft.place(IMAGES, index, (*draft.size, 3), np.uint8)


@dataclass(frozen=True, slots=True)
class TransformSample:
    """Pixels uint8 (H, W, 3) to what the transforms make of them, (C, H, W)."""

    transforms: tuple[Transform, ...]

    def __call__(self, sample: tuple[NDArray[np.uint8], int, int, str]) -> NDArray[Any]:
        pixels, seed, epoch, key = sample
        generator = sample_generator(seed=seed, epoch=epoch, key=key)
        image = apply_transforms(as_tensor(pixels.transpose(2, 0, 1)), self.transforms, generator)
        changed: NDArray[Any] = _checked(image).numpy()
        return changed


class TransformSamples(_SamplesOfPiece):
    """Results go to their place in the batch."""

    name = "transform"

    def __init__(self, image: ImageField) -> None:
        self._is_uint8 = image.pixels == "uint8"

    def take(self, piece: Piece, index: int) -> tuple[NDArray[np.uint8], int, int, str]:
        draft = piece.draft
        return piece.pixels.pop(index), draft.seed, draft.epoch, draft.keys[index]

    def put(self, piece: Piece, index: int, result: NDArray[Any]) -> None:
        draft = piece.draft
        if not self._is_uint8:
            out = draft.place(IMAGES, index, result.shape, np.float32)
            np.copyto(out, result, casting="same_kind")
            if result.dtype == np.uint8:
                as_tensor(out).mul_(1 / 127.5).sub_(1)
            return
        if result.dtype != np.uint8:
            raise DataError(f"the transforms gave {result.dtype}, pixels='uint8' wants uint8; use 'float32'")
        height_first = result.transpose(1, 2, 0)
        draft.place(IMAGES, index, height_first.shape, np.uint8)[...] = height_first


@dataclass(frozen=True, slots=True)
class TokenizeSample:
    """The texts of a row to their ids, int64 (T,); by column. A row without a text has no ids."""

    texts: Mapping[str, TextField]

    def __call__(self, sample: Mapping[str, str | None]) -> dict[str, NDArray[np.int64]]:
        ids = {}
        for name, field in self.texts.items():
            text = sample[name]
            found = np.asarray([] if text is None else field.tokenizer(text))
            if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
                raise DataError(
                    f"the tokenizer of {name!r} gave {found.dtype}{found.shape}, wanted whole numbers (T,)"
                )
            kept = found[: field.max_tokens]
            if kept.dtype == np.uint64 and len(kept) and kept.max() > _LARGEST_ID:
                raise DataError(
                    f"the tokenizer of {name!r} gave the id {kept.max()}, wanted 0..{_LARGEST_ID}"
                )
            ids[name] = kept.astype(np.int64)
        return ids


class TokenizeSamples(_SamplesOfPiece):
    """Ids wait in the draft until the longest text of the batch is known."""

    name = "tokenize"

    def __init__(self, texts: Mapping[str, TextField]) -> None:
        self._columns = tuple(texts)

    def take(self, piece: Piece, index: int) -> dict[str, str | None]:
        return {name: piece.draft.columns[name][index] for name in self._columns}

    def put(self, piece: Piece, index: int, result: dict[str, NDArray[np.int64]]) -> None:
        for name, ids in result.items():
            piece.draft.token_ids[name][index] = ids


def decode_function(image: ImageField | None, fields: Mapping[str, Field]) -> DecodeSample:
    """What decodes one sample, without the parts that belong to another stage."""
    return DecodeSample(None if image is None else replace(image, transforms=()), dict(fields))


def _checked(image: Any) -> Tensor:
    """The result of functions of the user's, uint8 or float32, apart from any graph."""
    if not isinstance(image, Tensor):
        raise DataError(f"the transforms gave {type(image).__name__}, wanted a tensor (C, H, W)")
    if image.ndim != 3 or not (image.dtype == torch.uint8 or image.is_floating_point()):
        raise DataError(
            f"the transforms gave {image.dtype}{tuple(image.shape)}, wanted (C, H, W) in uint8 or float"
        )
    return image if image.dtype == torch.uint8 else image.detach().float()


def check_parts_travel(stage_name: str, parts: Mapping[str, Any]) -> None:
    """Name the first part given by the user that a fresh process could not get.

    Raises:
        StageError: Names the stage, the part and the function.
    """
    for place, part in parts.items():
        check_function_travels(stage_name, part, place)
