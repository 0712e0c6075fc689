"""From the measurements of the storage benchmark to the rows of its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tools.bench.results import Row, median_row

__all__ = ["NOTES", "Measured", "epoch_rows", "filter_rows", "lookup_rows", "write_rows"]

Measured = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]

NOTES = [
    "Rows of one section come from interleaved rounds after one to warm up. Values are medians over the "
    "rounds; ratios are taken within a round. All files were in the page cache.",
    "Epochs: rows in random order into one preallocated batch of 256. Lance and datasets are asked for the "
    "rows of each batch, MDS for row after row; LitData and WebDataset deliver a shuffled stream of their "
    "own. All run in one process: worker processes did not help on two cores. The best peer is sought among "
    "those that keep arrays (and WebDataset, which cannot). LitData is also measured with raw bytes, which "
    "it hands out as views of its file; the program that reads them must know dtype and shape.",
    "Look-ups: ours compares the key and returns a copy; LMDB returns a copy; the hash index compares 64 "
    "bits of a hash and returns a view.",
    "Writing: a commit that is durable (fsync of files and folders) with checksums. Lance, MDS, LitData, "
    "datasets and WebDataset do not sync: the benchmark syncs their files for them, within the time. MDS "
    "writes xxh3 hashes; the others write no checksum of the pictures.",
]

_TITLES = {
    ("ours", "epoch64"): "ours",
    ("ours", "epoch224"): "ours",
    ("bare_numpy", "epoch64"): "numpy.take on the map",
    ("bare_numpy", "epoch224"): "numpy.take on the map",
    ("bare_numpy", "lookup"): "mapped hash index",
    ("lit", "epoch64_bytes"): "LitData, raw bytes",
    ("lit", "epoch224_bytes"): "LitData, raw bytes",
    ("duckdb_file", "filter"): "DuckDB on one Parquet file",
    ("duckdb_file", "filter_own"): "DuckDB's own file",
}
_NAMES = {
    "lance_dataset": "Lance",
    "mds": "MDS",
    "lit": "LitData",
    "hugging_face": "HF datasets",
    "tars": "WebDataset",
    "lmdb_file": "LMDB",
    "sqlite_file": "SQLite",
    "arrow_file": "pyarrow on a map",
}


def _title(contender: tuple[str, str]) -> str:
    return _TITLES.get(contender) or _NAMES[contender[0]]


def epoch_rows(measured: Measured, task: str, shape: str, *, peer_factor: float) -> list[Row]:
    """Samples per second of every library; all must have delivered the same rows."""
    sums = {_title(c): {run["sum"] for run in runs} for c, runs in measured.items() if "sum" in runs[0]}
    if len(set.union(*sums.values())) > 1:
        raise ValueError(f"{task}: the libraries did not deliver the same rows: {sums}")
    speeds = {c: [run["rows"] / run["seconds"] for run in runs] for c, runs in measured.items()}
    ours = speeds.pop(("ours", task))
    bare = speeds.pop(("bare_numpy", task))
    views = speeds.pop(("ours", "consecutive"), None)
    row_bytes = int(np.prod([int(size) for size in shape.split("x")]))
    first = [run["rows"] / run["first_seconds"] for run in measured["ours", task]]
    best = max((c for c in speeds if c[1] == task), key=lambda contender: np.median(speeds[contender]))
    metric = f"shuffled epoch {shape}"
    against_bare = median_row(metric, ours, "samples/s", peer=_title(("bare_numpy", task)), peer_values=bare)
    against_best = median_row(
        f"{metric}, best peer", ours, "samples/s", peer=_title(best), peer_values=speeds[best]
    )
    rows = [
        _judged(against_bare, "at least 0.9", lambda ratio: ratio >= 0.9),
        _judged(against_best, f"at least {peer_factor:g}", lambda ratio: ratio >= peer_factor),
        median_row(f"{metric}, bytes", [speed * row_bytes / 1e9 for speed in ours], "GB/s"),
        median_row(
            f"{metric}, first epoch with checksums", first, "samples/s", peer="later epochs", peer_values=ours
        ),
        *(
            median_row(f"{metric}, {_title(c)}", ours, "samples/s", peer=_title(c), peer_values=theirs)
            for c, theirs in speeds.items()
            if c != best
        ),
    ]
    if views is not None:
        copied = [float(run["bytes_copied"]) for run in measured["ours", "consecutive"]]
        rows.append(median_row(f"consecutive batches {shape}", views, "samples/s"))
        rows.append(
            median_row(
                f"consecutive batches {shape}, copied", copied, "bytes", target="0", holds=max(copied) == 0
            )
        )
    return rows


def lookup_rows(measured: Measured) -> list[Row]:
    """Microseconds of one look-up: median and 99th percentile of each round."""
    rows = []
    quantiles = (("median", 50, 4.0), ("99th percentile", 99, 15.0))
    for name, percent, limit in quantiles:
        times = {
            c: [float(np.percentile(run["seconds"], percent)) * 1e6 for run in runs]
            for c, runs in measured.items()
        }
        ours = times.pop(("ours", "lookup"))
        own = median_row(f"look-up by key, {name}", ours, "us")
        rows.append(_with(own, f"at most {limit:g} us", own.value <= limit))
        rows += [
            median_row(f"look-up by key, {name}", ours, "us", peer=_title(c), peer_values=theirs)
            for c, theirs in times.items()
        ]
    return rows


def filter_rows(measured: Measured) -> list[Row]:
    """Milliseconds of one filter, ids out; all must have found the same rows."""
    found = {
        _title(c) if c[0] != "ours" else "ours": {run["sum"] for run in runs} for c, runs in measured.items()
    }
    if len(set.union(*found.values())) > 1:
        raise ValueError(f"filter: the libraries did not find the same rows: {found}")
    times = {c: [run["seconds"] * 1e3 for run in runs] for c, runs in measured.items()}
    ours = times.pop(("ours", "filter"))
    rows = []
    for contender, theirs in times.items():
        row = median_row("filter, ids out", ours, "ms", peer=_title(contender), peer_values=theirs)
        if contender == ("duckdb_file", "filter"):
            row = _judged(row, "at most 1.2", lambda ratio: ratio <= 1.2)
        rows.append(row)
    return rows


def write_rows(measured: Measured) -> list[Row]:
    """Megabytes per second of a durable commit."""
    speeds = {c: [run["bytes"] / run["seconds"] / 1e6 for run in runs] for c, runs in measured.items()}
    ours = speeds.pop(("ours", "write"))
    best = max(speeds, key=lambda contender: np.median(speeds[contender]))
    rows = []
    for contender, theirs in sorted(speeds.items(), key=lambda item: -float(np.median(item[1]))):
        row = median_row("writing pictures", ours, "MB/s", peer=_title(contender), peer_values=theirs)
        if contender == best:
            row = _judged(row, "at least 0.8", lambda ratio: ratio >= 0.8)
        rows.append(row)
    return rows


def _judged(row: Row, target: str, meets: Callable[[float], bool]) -> Row:
    return _with(row, target, row.ratio is not None and meets(row.ratio))


def _with(row: Row, target: str, holds: bool) -> Row:
    return replace(row, target=target, holds=holds)
