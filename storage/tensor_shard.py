"""One tensor column of one part, on the map of its file."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import xxhash

from storage.backends.base import Backend
from storage.checked_files import read_row_file
from storage.errors import CorruptionError
from storage.manifest import TensorFile, TensorSpec
from storage.tensors import block_rows, read_block_checksums

__all__ = ["TensorShard"]


class TensorShard:
    """One tensor column of one part. `array` is a read-only view of the map: (rows with a value, *shape).

    present: the rows of the part that have a value, int64 ascending; None when all have one. Every method
    but `positions` counts the rows of `array`.
    """

    def __init__(self, backend: Backend, ref: TensorFile, spec: TensorSpec, part_rows: int) -> None:
        self._backend = backend
        self._ref = ref
        self._spec = spec
        self._dtype = np.dtype(spec.dtype)
        self._mapped, self.identity = backend.map(ref)
        self._raw = self._mapped[ref.offset : ref.offset + ref.rows * spec.row_bytes]
        self.array = self._shaped(self._raw)
        self._block_rows = block_rows(spec)
        self._checksums: np.ndarray | None = None
        self._unread = np.ones(-(-ref.rows // self._block_rows), bool)
        self._num_unread = len(self._unread)
        self.present = None if ref.present is None else read_row_file(backend, ref.present)
        if self.present is not None and self.present[-1] >= part_rows:
            raise CorruptionError(
                f"{backend.place(ref.path)}: a value is listed for row {self.present[-1]} of a part of "
                f"{part_rows} rows; copy it back from a backup"
            )

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Where in `array` the rows of the part lie, int64 (n,); -1 where a row has no value."""
        if self.present is None:
            return rows
        at = np.minimum(self.present.searchsorted(rows), len(self.present) - 1)
        return np.where(self.present[at] == rows, at, -1)

    def _shaped(self, raw: np.ndarray) -> np.ndarray:
        return raw.view(self._dtype).reshape(-1, *self._spec.shape)

    def private(self, start: int, stop: int) -> np.ndarray:
        """Rows start:stop as a copy-on-write map of their own, safe to write to."""
        first, last = (self._ref.offset + row * self._spec.row_bytes for row in (start, stop))
        return self._shaped(self._backend.map_private(self._ref, self.identity, first, last))

    def check(self, rows: np.ndarray | slice, policy: str) -> None:
        """Compare the checksums of the blocks that hold `rows`; a block is compared once under "first-read".

        Raises:
            CorruptionError: With file, rows and byte range of the first block that differs.
        """
        if policy == "never" or (policy == "first-read" and not self._num_unread):
            return
        if isinstance(rows, slice):
            touched = np.arange(rows.start // self._block_rows, -(-rows.stop // self._block_rows))
        else:
            touched = rows // self._block_rows
        if policy == "first-read":
            touched = touched[self._unread[touched]]
        blocks = sorted(set(touched.tolist()))
        if blocks:
            self._backend.confirm(self._ref, self.identity)
        for block in blocks:
            self._check_block(block)
        if blocks and self._num_unread:
            self._unread[blocks] = False
            self._num_unread = int(np.count_nonzero(self._unread))

    def check_row(self, row: int, policy: str) -> None:
        """`check` for one row."""
        if policy == "always" or (
            policy != "never" and self._num_unread and self._unread[row // self._block_rows]
        ):
            self.check(slice(row, row + 1), policy)

    def _check_block(self, block: int) -> None:
        step = self._block_rows * self._spec.row_bytes
        found = xxhash.xxh3_64_intdigest(self._raw[block * step : (block + 1) * step].data)
        if found != self.checksums[block]:
            first = block * self._block_rows
            raise CorruptionError(
                f"{self._backend.place(self._ref.path)}: rows {first} to "
                f"{min(first + self._block_rows, self._ref.rows) - 1} "
                f"of the {'part' if self.present is None else 'file'} "
                f"(from byte {self._ref.offset + block * step}) do not match their checksum; "
                "copy the file back from a backup"
            )

    def damage(self) -> list[str]:
        """One text for each block that does not match its checksum."""
        texts = []
        for block in range(len(self._unread)):
            try:
                self._check_block(block)
            except CorruptionError as error:
                texts.append(str(error))
        return texts

    @property
    def checksums(self) -> np.ndarray:
        """uint64 (blocks,), from the footer of the file."""
        if self._checksums is None:
            place = self._backend.place(self._ref.path)
            try:
                content = read_block_checksums(self._mapped)
            except (pa.ArrowInvalid, OSError, KeyError, ValueError, TypeError) as error:
                raise CorruptionError(
                    f"{place}: the footer is damaged: {error}; copy the file back"
                ) from error
            if xxhash.xxh3_128_hexdigest(content) != self._ref.blocks_xxh3:
                raise CorruptionError(
                    f"{place}: the footer is not the one that was written; copy the file back"
                )
            self._checksums = np.frombuffer(content, ">u8")
        return self._checksums
