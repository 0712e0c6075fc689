"""A store that is larger than the memory its reader may have: python -m tools.soak.memory

The reader runs in a memory cgroup where this machine lets us make one, else under a limit on its heap.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage import FeatureStore
from tools.soak.tracing import fork

__all__ = ["read_in_little_memory", "write_large_store"]

_ROW = (256, 256)
_ROW_BYTES = 256 * 256 * 4
_BATCH = 16
_CGROUPS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
_SLACK_BYTES = 24 << 20


def write_large_store(path: Path, num_bytes: int) -> None:
    """Write a store of so many bytes of tensors in four parts, and let the system forget their pages."""
    store = FeatureStore.create(path)
    rows = num_bytes // _ROW_BYTES
    for part in range(4):
        with store.writer(tensors={"x": ("float32", _ROW)}) as writer:
            for i in range(part * rows // 4, (part + 1) * rows // 4):
                writer.add(f"k{i}", b"blob %d" % i * 200, {"x": np.full(_ROW, i, np.float32)}, number=i)
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def read_in_little_memory(path: Path, limit_bytes: int) -> str:
    """Read every byte of the store in a child that may have so much memory; which limit it had.

    Raises:
        SystemExit: If the child was killed, or needed more heap than it should.
    """
    with contextlib.ExitStack() as cleanup:
        group = _make_group(limit_bytes, cleanup)
        pid = fork(lambda: _read_under_limit(path, limit_bytes, group))
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"reading in {limit_bytes} bytes ended with {os.waitstatus_to_exitcode(status)}")
    return "cgroup" if group else "heap limit"


def _make_group(limit_bytes: int, cleanup: contextlib.ExitStack) -> Path | None:
    for root, limit_name in _CGROUPS:
        group = root / f"unirl-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        cleanup.callback(_remove_group, group)
        with contextlib.suppress(OSError):
            (group / limit_name).write_text(str(limit_bytes), encoding="ascii")
            return group
    return None


def _remove_group(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return


def _read_under_limit(path: Path, limit_bytes: int, group: Path | None) -> None:
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    else:
        heap = _proc_bytes("status", "VmData") + limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (heap, heap))
    _read_all(path)


def _read_all(path: Path) -> None:
    """By views, by gathers in any order within a window, and blob by blob; the heap must stay flat."""
    store = FeatureStore.open(path)
    column = store.tensor("x")
    out = np.empty((_BATCH, *_ROW), np.float32)
    rng = np.random.default_rng(0)
    column.gather(np.arange(_BATCH), out=out)
    allocated, private = pa.total_allocated_bytes(), _proc_bytes("smaps_rollup", "Private_Dirty")
    for part in store.snapshot.parts:
        for start in range(part.first_row, part.end_row, _BATCH):
            rows = np.arange(start, min(start + _BATCH, part.end_row))
            assert (column[int(rows[0]) : int(rows[-1]) + 1] == rows[:, None, None]).all()
            rng.shuffle(rows)
            assert (column.gather(rows, out=out[: len(rows)]) == rows[:, None, None]).all()
            assert store.blob(start) == b"blob %d" % start * 200
    grown = _proc_bytes("smaps_rollup", "Private_Dirty") - private
    assert grown < _SLACK_BYTES, f"the heap grew by {grown} bytes"
    assert pa.total_allocated_bytes() - allocated < 1 << 20
    assert store.verify().ok


def _proc_bytes(file: str, field: str) -> int:
    text = Path(f"/proc/self/{file}").read_text(encoding="utf-8")
    return sum(int(kib) << 10 for kib in re.findall(rf"^{field}: +(\d+) kB", text, re.MULTILINE))


def main(tell: Callable[[str], None] = lambda text: print(text, flush=True)) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store-mib", type=int, default=2048)
    parser.add_argument("--limit-mib", type=int, default=512)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "store"
        tell(f"writing {given.store_mib} MiB")
        pid = fork(lambda: write_large_store(path, given.store_mib << 20))
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("the store could not be written")
        limit = read_in_little_memory(path, given.limit_mib << 20)
    sys.stdout.write(f"{given.store_mib} MiB were read in {given.limit_mib} MiB ({limit})\n")


if __name__ == "__main__":
    main()
