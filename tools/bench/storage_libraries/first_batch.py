"""How long a new process takes from opening a store to its first shuffled batch, without the imports.

python -m tools.bench.storage_libraries.first_batch STORE
"""

from __future__ import annotations

import sys
import time

import numpy as np

from storage import FeatureStore


def main() -> None:
    """Print the seconds of opening and of the batch."""
    rng = np.random.default_rng(0)
    started = time.perf_counter()
    store = FeatureStore.open(sys.argv[1])
    opened = time.perf_counter()
    rows = rng.permutation(len(store))[:256]
    store.tensor("image").gather(rows)
    print(opened - started, time.perf_counter() - opened)


if __name__ == "__main__":
    main()
