"""A batch while it is made: what its pieces have put in so far, and which of its samples are bad."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from datapipe.collate import Batch
from datapipe.device import InFlight
from datapipe.errors import LoaderError
from datapipe.reasons import reason_of
from datapipe.ring import BufferRing

__all__ = ["IMAGES", "BadSample", "Draft", "Piece", "UnevenError"]

IMAGES: Final = "images"
STAGES: Final = ("fetch", "decode", "transform", "tokenize", "collate", "device")
"""In the order that a sample passes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    """A sample that failed, and where."""

    key: str
    row: int  # in the store
    stage: str
    error: Exception

    @property
    def reason(self) -> str:
        """A stable code for counting: that of the error, or the name of its kind."""
        return reason_of(self.error)

    def __str__(self) -> str:
        return f"sample {self.key!r} (row {self.row}): {self.error}"


@dataclass(slots=True, eq=False)
class Draft:
    """What is known of one batch. Pieces of it are worked on at the same time."""

    rows: NDArray[np.int64]
    size: tuple[int, int] | None  # (height, width) that pictures are decoded to
    seed: int
    epoch: int
    ring: BufferRing
    keys: list[str] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    gathered: dict[str, NDArray[Any]] = field(default_factory=dict)  # tensor columns
    made: dict[str, NDArray[Any]] = field(default_factory=dict)  # pictures under IMAGES, and the fields
    token_ids: dict[str, dict[int, NDArray[np.int64]]] = field(default_factory=dict)
    bad: dict[int, BadSample] = field(default_factory=dict)
    num_open: int = 1  # pieces that are not collated yet
    is_fetched: bool = False
    batch: Batch | None = None
    in_flight: InFlight | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def place(self, name: str, index: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Where the array of a row goes; the first one that is finished sets the shape of the batch."""
        with self.lock:
            held = self.made.get(name)
            if held is None:
                held = self.made[name] = self.ring.lend((len(self.rows), *shape), dtype)
        if held.shape[1:] != shape or held.dtype != dtype:
            raise UnevenError(
                f"its {name} are {np.dtype(dtype)}{shape}, those of the batch {held.dtype}{held.shape[1:]}; "
                f"give the field a size, or end the transforms with one that sets it"
            )
        placed: NDArray[Any] = held[index, ...]  # an array even where each row is a single number
        return placed

    def drop(self, index: int, stage: str, error: Exception) -> None:
        """Leave a sample out.

        Of a sample that is bad in several stages the first stage's error counts. Its tensors may be fetched
        while its picture is decoded, and threads must not decide what is reported.
        """
        bad = BadSample(key=self.keys[index], row=int(self.rows[index]), stage=stage, error=error)
        with self.lock:
            held = self.bad.get(index)
            if held is None or STAGES.index(stage) < STAGES.index(held.stage):
                self.bad[index] = bad

    def pieces(self, num_pieces: int) -> Iterator[Piece]:
        """Cut the rows into neighbours, one piece or more."""
        num_rows = len(self.rows)
        bounds = np.linspace(0, num_rows, min(num_pieces, max(num_rows, 1)) + 1).astype(int).tolist()
        self.num_open = len(bounds) - 1
        for start, stop in pairwise(bounds):
            yield Piece(drafts=[self], start=start, stop=stop, at=start)


class UnevenError(LoaderError):
    """Rows of one batch gave arrays of several shapes. Which of them are wrong nobody can say."""


@dataclass(slots=True, eq=False)
class Piece:
    """What one worker is at: neighbouring rows of a batch, or several whole batches.

    Its text is the key that the worker is at.
    """

    drafts: list[Draft]
    start: int
    stop: int
    at: int
    blobs: dict[int, memoryview] = field(default_factory=dict)
    tensors: dict[str, dict[int, NDArray[Any]]] = field(default_factory=dict)  # for the fields
    pixels: dict[int, NDArray[np.uint8]] = field(default_factory=dict)  # for the transforms
    collated: list[Draft] = field(default_factory=list)

    @property
    def draft(self) -> Draft:
        """The batch of a piece that is part of one."""
        return self.drafts[0]

    @property
    def is_last(self) -> bool:
        """Whether its batches are whole once all earlier pieces are done."""
        return self.stop == len(self.draft.rows)

    def let_go(self) -> None:
        """Forget the batches, after the last stage."""
        self.drafts, self.collated = [], []

    def indices(self) -> Iterator[int]:
        """The samples that are not bad so far."""
        for index in range(self.start, self.stop):
            self.at = index
            if index not in self.draft.bad:
                yield index

    def __str__(self) -> str:
        if not self.drafts or not len(self.draft.rows):
            return "(none)"
        draft = self.draft
        return draft.keys[self.at] if draft.keys else f"row {int(draft.rows[self.at])}"
