"""Text and blobs of more than 2 GB in one shard, beyond the reach of 32 bits: python -m tools.soak.large"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from storage import FeatureStore

_PIECE_BYTES = 128 << 20


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pieces", type=int, default=17, help="of 128 MB each; 17 are more than 2^31 bytes")
    given = parser.parse_args()
    text = "0123456789abcde\n" * (_PIECE_BYTES // 16)
    with tempfile.TemporaryDirectory() as scratch:
        store = FeatureStore.create(Path(scratch) / "store")
        print(f"writing {given.pieces} texts and blobs of {_PIECE_BYTES >> 20} MiB", flush=True)
        with store.writer() as writer:
            for i in range(given.pieces):
                writer.add(f"k{i}", text.encode(), text=f"{i:02d}{text}")
        store = store.refresh()
        sizes = store.query("SELECT sum(length(text)) FROM samples").column(0)[0].as_py()
        assert sizes == given.pieces * (len(text) + 2)
        last = given.pieces - 1
        assert store.blob(last)[-16:] == text[-16:].encode()
        column = store.select().column("text")
        assert column[last].as_py()[:18] == f"{last:02d}{text[:16]}"
        del column
        assert store.verify().ok
        store.compact(max_part_bytes=1 << 40)
    print(f"{given.pieces * _PIECE_BYTES} bytes of text in one column are read as they were written")


if __name__ == "__main__":
    main()
