"""What a store with very many rows costs: seconds to open it, memory, and memory of each forked worker.

python -m tools.bench.storage_libraries.large_index STORE
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from numpy.random import default_rng

from storage import FeatureStore, View

_WORKERS = 4
_ROWS_PER_WORKER = 100_000


def main() -> None:
    """Print one JSON object."""
    before = _private_bytes()
    started = time.perf_counter()
    view = FeatureStore.open(sys.argv[1]).select()
    seconds = time.perf_counter() - started
    opened = _private_bytes() - before
    context = multiprocessing.get_context("fork")
    grown = []
    for worker in range(_WORKERS):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_read, args=(view, worker, sender))
        process.start()
        grown.append(receiver.recv())
        process.join()
    print(json.dumps({"seconds": seconds, "bytes": opened, "worker_bytes": grown}))


def _read(view: View, worker: int, sender: Connection) -> None:
    """Read the keys of rows in random order, and find some of these keys again."""
    before = _private_bytes()
    rows = default_rng(worker).choice(view.rows, _ROWS_PER_WORKER)
    for row in rows.tolist():
        key = view.store.key(row)
        if row % 10 == 0 and view.store.row(key) != row:
            raise ValueError(f"key {key!r} was not found at row {row}")
    sender.send(_private_bytes() - before)


def _private_bytes() -> int:
    """Memory of this process alone. Pages of mapped files are not counted: the system can drop them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return 1024 * int(sizes["Private_Dirty"])


if __name__ == "__main__":
    main()
