"""Ranks over gloo that meet in a collective at every step of a loader: loader_ranks.py STORE WORLD_SIZE.

Each printed line is what all ranks of one case saw together. The ranks are forked after the imports.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from datapipe import Loader
from storage import FeatureStore

# Rows of the view, rows of a global batch, whether rows that do not fill one are left out.
CASES = [(97, 8, False), (97, 8, True), (6, 4, False), (1, 4, False), (2, 4, False), (9, 4, False)]


def main() -> None:
    """Start the ranks, and end with the worst of their exit codes."""
    store, world_size = Path(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        children = [_fork(store, rank, world_size, meeting) for rank in range(world_size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))


def _fork(store: Path, rank: int, world_size: int, meeting: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        for num_rows, batch_size, drop_last in CASES:
            _visit(store, num_rows, batch_size, drop_last)
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _visit(store: Path, num_rows: int, batch_size: int, drop_last: bool) -> None:
    """One epoch, with the number of rows added up over the ranks in every step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = Loader(
        FeatureStore.open(store).select()[:num_rows],
        batch_size=batch_size,
        image=None,
        columns=(),
        drop_last=drop_last,
        rank=rank,
        world_size=world_size,
    )
    sizes, mine = [], []
    for batch in loader:
        count = torch.tensor(len(batch))
        dist.all_reduce(count)
        sizes.append(int(count))
        mine += batch.rows.tolist()
    gathered: list[list[int]] = [[] for _ in range(world_size)]
    dist.all_gather_object(gathered, mine)
    if rank == 0:
        rows = sorted(row for each in gathered for row in each)
        case = [num_rows, batch_size, drop_last]
        found = {"case": case, "rows": rows, "sizes": sizes, "steps": len(loader)}
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
