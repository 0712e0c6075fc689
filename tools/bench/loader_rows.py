"""From the measurements of the loader benchmark to the rows of its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.results import Row, median_row

__all__ = ["NOTES", "Measured", "first_rows", "picture_rows", "tensor_rows"]

Measured = Mapping[str, Sequence[Mapping[str, Any]]]

NOTES = [
    "Rows of one section come from interleaved rounds after one to warm up. Values are medians over the "
    "rounds; ratios are taken within a round. All files were in the page cache.",
    "Pictures: JPEGs of about 350 pixels a side, in shuffled batches of 64 of uint8 RGB, resized by plain "
    "bilinear interpolation. All decode with the same calls of libjpeg-turbo and torch. Ours decodes in two "
    "threads, which also compare checksums; the peers in two worker processes that live from epoch to epoch.",
    "Memory: the most that the process and its workers took at once in an epoch, anonymous and shared pages, "
    "each counted once. The imports are in it, mapped files are not.",
    "First batch: eight pictures, in a process that has imported its library; the peers without workers, and "
    "MDS by row number. Ours opens the store anew each time.",
    "Overlap: one thread makes data for three quarters of a step of 20 ms, in which the model waits as for a "
    "GPU, or computes on the other core. How much two cores take from each other is the machine's: the last "
    "row has the same data made by another process.",
]
_NAMES = {
    "tars": "WebDataset",
    "lit": "LitData",
    "mds": "MDS",
    "hugging_face": "HF datasets",
    "lance_dataset": "Lance",
    "energon": "Energon",
}
_MIB = 1 << 20
_EXACT = ("ours", "bare_loop", "lit", "mds", "hugging_face", "lance_dataset", "tars")
_ITEM_BYTES = {"64": 3 * 64 * 64, "224": 3 * 224 * 224}


def picture_rows(measured: Measured) -> list[Row]:
    """Pictures a second and memory of every library; those that visit each row once must agree on the sum."""
    sums = {name: {run["sum"] for run in measured[name]} for name in measured if name in _EXACT}
    if len(set().union(*sums.values())) != 1:
        raise ValueError(f"the libraries did not deliver the same pictures: {sums}")
    rates = {name: [run["rows"] / run["seconds"] for run in runs] for name, runs in measured.items()}
    memory = {name: [run["peak_bytes"] / _MIB for run in runs] for name, runs in measured.items()}
    peers = [name for name in _NAMES if name in measured]
    metric = "JPEG to 224 RGB, batches of 64, 2 threads"
    rows = [_against(metric, rates, "bare_loop", "the bare decode loop", "images/s", 0.95)]
    if peers:
        best = max(peers, key=lambda name: sorted(rates[name])[len(rates[name]) // 2])
        rows.append(_against(metric, rates, best, f"{_NAMES[best]}, the best of them", "images/s", 1.3))
        leanest = min(peers, key=lambda name: max(memory[name]))
        rows.append(_against("memory", memory, leanest, f"{_NAMES[leanest]}, the leanest", "MiB", 0.7))
    for name in peers:
        rows.append(median_row(f"{metric}: {_NAMES[name]}, 2 workers", rates[name], "images/s"))
        rows.append(median_row(f"memory: {_NAMES[name]}, 2 workers", memory[name], "MiB"))
    return rows


def tensor_rows(measured: Mapping[str, Measured]) -> list[Row]:
    """Samples a second from tensor columns, and bytes copied for each; by the side of the tensors."""
    rows = []
    for side, runs in measured.items():
        rates = {name: [1 / run["seconds"] for run in each] for name, each in runs.items()}
        metric = f"tensor column of 3x{side}x{side}, shuffled batches of 256"
        bare = "numpy.take into a preallocated batch"
        rows.append(_against(metric, rates, "bare_gather", bare, "samples/s", 0.9))
        for order, key, wanted in (
            ("shuffled", "copied_per_sample", _ITEM_BYTES[side]),
            ("consecutive", "copied_per_consecutive_sample", 0),
        ):
            copied = [run[key] for run in runs["ours"]]
            title = f"bytes copied for a sample of 3x{side}x{side}, {order}"
            holds = set(copied) == {wanted}
            rows.append(median_row(title, copied, "bytes", target=f"{wanted}", holds=holds))
        consecutive = [1 / run["consecutive_seconds"] for run in runs["ours"]]
        rows.append(
            median_row(f"tensor column of 3x{side}x{side}, consecutive, as views", consecutive, "samples/s")
        )
    return rows


def first_rows(measured: Measured, num_shards: int) -> list[Row]:
    """Milliseconds to the first batch out of very many shards."""
    runs = measured["ours"]
    metric = f"{num_shards} shards"
    ours = {key: [1000 * run[f"{key}seconds"] for run in runs] for key in ("", "open_", "loader_")}
    loader = ours["loader_"]
    holds = sorted(loader)[len(loader) // 2] <= 30
    rows = [
        median_row(f"{metric}: first batch after construction", loader, "ms", target="<= 30", holds=holds),
        median_row(f"{metric}: opening the store and a view", ours["open_"], "ms"),
        median_row(f"{metric}: opening, construction and first batch", ours[""], "ms"),
    ]
    for name, title in _NAMES.items():
        if name in measured:
            times = [1000 * run["seconds"] for run in measured[name]]
            rows.append(median_row(f"{metric}: from nothing to the first batch, {title}", times, "ms"))
    return rows


def _against(
    metric: str, values: Mapping[str, Sequence[float]], peer: str, title: str, unit: str, factor: float
) -> Row:
    """A row of ours beside a peer; memory wants at most the factor, speed at least."""
    ratios = sorted(mine / theirs for mine, theirs in zip(values["ours"], values[peer]))
    ratio, is_most = ratios[len(ratios) // 2], unit == "MiB"
    return median_row(
        metric,
        values["ours"],
        unit,
        peer=title,
        peer_values=values[peer],
        target=f"{'<=' if is_most else '>='} {factor}",
        holds=ratio <= factor if is_most else ratio >= factor,
    )
