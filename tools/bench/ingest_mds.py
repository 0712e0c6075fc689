"""Write a folder of JPEGs and captions as MDS shards, and print the seconds. Runs in the peers' environment.

python -m tools.bench.ingest_mds FOLDER TARGET
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tools.bench.storage_libraries import torchvision_ops  # noqa: F401  before streaming
from tools.bench.storage_libraries.task import make_durable

from streaming import MDSWriter  # isort: skip


def main() -> None:
    """Read each file and its caption, write both with xxh3 hashes, and sync."""
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    columns = {"key": "str", "image": "bytes", "caption": "str"}
    started = time.perf_counter()
    with MDSWriter(out=str(target), columns=columns, hashes=["xxh3_64"]) as writer:
        for path in sorted(folder.glob("*.jpg")):
            caption = path.with_suffix(".txt").read_text()
            writer.write({"key": path.stem, "image": path.read_bytes(), "caption": caption})
    make_durable(target)
    print(time.perf_counter() - started)


if __name__ == "__main__":
    main()
