"""Making the files of one part from a stream of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from storage.blobs import Blob, BlobWriter
from storage.columns import Scalar
from storage.index import IndexWriter
from storage.keys import KeyTableWriter
from storage.manifest import FileRef, Part, TensorFile, TensorSpec
from storage.rows import write_row_file
from storage.staging import Staging
from storage.tensors import TensorSpool

__all__ = ["PartBuilder", "seal_tensor"]


class PartBuilder:
    """Streams rows into the files of a part `part_id`, in a folder of `staging`.

    `types` gives the type of each metadata column at the time of the call. Memory holds a few chunks of each
    column and about 100 bytes a row.
    """

    def __init__(self, staging: Staging, part_id: str, types: Callable[[], Mapping[str, str]]) -> None:
        self.tensors: dict[str, TensorSpool] = {}
        self._staging = staging
        self._part_id = part_id
        self._folder = staging.path / part_id
        (self._folder / "blobs").mkdir(parents=True)
        self.keys = KeyTableWriter(self._folder / "keys.spool")
        self._blobs = BlobWriter(self._folder / "blobs")
        self._index = IndexWriter(self._folder, types)

    def __len__(self) -> int:
        return len(self.keys)

    def add_tensor(self, name: str, spec: TensorSpec) -> None:
        """Declare a tensor column, before the first row; its rows are appended to `tensors[name]`."""
        self.tensors[name] = TensorSpool(name, spec, self._folder / f"tensor-{name}.spool")

    def add(self, key: bytes, key_hash: int, blob: Blob | None, columns: Mapping[str, Scalar]) -> None:
        """Append one row but for its tensors."""
        row = len(self)
        self.keys.add(key, key_hash)
        self._blobs.add(key, blob)
        own: dict[str, Scalar] = {"key": key.decode(), "hash": None, "bytes": None}
        if blob is not None:
            own |= {"hash": self._blobs.digest(row), "bytes": memoryview(blob).nbytes}
        self._index.add({**own, **columns})

    def add_rows(
        self,
        keys: Sequence[bytes],
        hashes: Sequence[int],
        blobs: Sequence[Blob | None] | None,
        columns: Mapping[str, Sequence[Scalar]],
    ) -> None:
        """Append rows but for their tensors; blobs is None when no row has one."""
        first = len(self)
        for key, key_hash in zip(keys, hashes):
            self.keys.add(key, key_hash)
        own: dict[str, Sequence[Scalar]] = {"key": [key.decode() for key in keys]}
        if blobs is None:
            self._blobs.add_absent(len(keys))
        else:
            for key, blob in zip(keys, blobs):
                self._blobs.add(key, blob)
            own["hash"] = [
                None if blob is None else self._blobs.digest(first + at) for at, blob in enumerate(blobs)
            ]
            own["bytes"] = [None if blob is None else memoryview(blob).nbytes for blob in blobs]
        self._index.add_rows(len(keys), own | dict(columns))

    def seal(self, row_ids: np.ndarray | None = None) -> Part:
        """Finish the files and give them their final names.

        Args:
            row_ids: int64 (rows,) ascending, the numbers of the rows; None leaves them to the publisher.
        """
        part_id, rows = self._part_id, len(self)
        offsets, lengths, digests = self._blobs.seal(self.keys.key)
        with ThreadPoolExecutor(1, thread_name_prefix="seal") as pool:
            # The blobs wait for the disk, the index for the processor.
            installing = pool.submit(self._install_blobs)
            self.keys.write(self._folder / "keys.arrow", offsets, lengths, digests)
            self._index.write(self._folder / "index.parquet")
            blobs = installing.result()
        first, end, row_file = 0, rows, None
        if row_ids is not None:
            first, end = int(row_ids[0]), int(row_ids[-1]) + 1
            if end - first != rows:
                write_row_file(self._folder / "rows.arrow", row_ids)
                row_file = self._staging.install(
                    self._folder / "rows.arrow", f"index/part-{part_id}.rows.arrow", rows
                )
        return Part(
            id=part_id,
            first_row=first,
            end_row=end,
            rows=rows,
            row_ids=row_file,
            index=self._staging.install(
                self._folder / "index.parquet", f"index/part-{part_id}.parquet", rows
            ),
            keys=self._staging.install(self._folder / "keys.arrow", f"index/part-{part_id}.keys.arrow", rows),
            blobs=blobs,
            tensors={
                name: file
                for name, spool in self.tensors.items()
                if (file := seal_tensor(self._staging, spool, part_id)) is not None
            },
        )

    def _install_blobs(self) -> FileRef | None:
        if not self._blobs.count:
            return None
        name = f"blobs/{self._part_id}/data.mdb"
        return self._staging.install(self._blobs.path, name, self._blobs.count)

    def close(self) -> None:
        """Release the files; what was not sealed is removed with the staging folder."""
        self._blobs.close()
        self.keys.close()
        for spool in self.tensors.values():
            spool.close()


def seal_tensor(staging: Staging, spool: TensorSpool, name: str) -> TensorFile | None:
    """Turn a spooled column of one part into files with their final names; None when no row has a value."""
    present = spool.present()
    if not len(present):
        return None
    path = staging.path / f"tensor-{spool.name}.arrow"
    offset, blocks = spool.seal(path)
    listed = None
    if len(present) < spool.rows:
        write_row_file(staging.path / "present.arrow", present)
        listed = staging.install(
            staging.path / "present.arrow", f"tensors/{spool.name}/{name}.rows.arrow", len(present)
        )
    ref = staging.install(path, f"tensors/{spool.name}/{name}.arrow", len(present))
    return TensorFile(
        path=ref.path,
        bytes=ref.bytes,
        xxh3=ref.xxh3,
        rows=ref.rows,
        offset=offset,
        blocks_xxh3=blocks,
        present=listed,
    )
