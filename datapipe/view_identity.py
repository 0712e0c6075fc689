"""What tells a view from another one: its rows, and the samples that they are."""

from __future__ import annotations

from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from datapipe.joined import JoinedView, reader_of
from storage import StorageError, View

__all__ = ["hash_keys", "hash_rows"]

_NUM_KEYS: Final = 4
"""Keys that are looked at. They may lie in as many shards, each of which takes a millisecond to open."""
_SHIFT: Final = 11  # leaves 53 bits, which any JSON keeps exactly


def hash_rows(rows: NDArray[np.int64]) -> int:
    """Hash of the row ids, in their order: the upper 53 bits of their xxh3_64."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows).data) >> _SHIFT


def hash_keys(view: View | JoinedView) -> int:
    """Hash of up to 4 keys at even distances, the first and the last among them: 53 bits of xxh3_64.

    Row ids are numbers that every store has; keys are the names of its samples. They stay when a store is
    copied, moved, compacted or appended to. Another store of as many rows, or one that was made again from
    other files, has others in these places. 0 stands for keys that cannot be read, as of a damaged shard,
    whose rows a loader may be allowed to leave out.
    """
    places = np.linspace(0, len(view) - 1, min(len(view), _NUM_KEYS)).astype(np.int64)
    try:
        keys = reader_of(view, ()).keys(view.rows[places])
    except StorageError:
        return 0
    digest = xxhash.xxh3_64()
    for key in keys:
        encoded = key.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.intdigest() >> _SHIFT
