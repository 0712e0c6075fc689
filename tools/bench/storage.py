"""The feature store beside other libraries: epochs, look-ups, filters, writing, opening.

python -m tools.bench.storage [--quick] [--rounds 3] [--only SECTION ...] [--data FOLDER]

Writes benchmarks/storage.json and .md. The libraries stand in an environment of their own, which the first
run makes from tools/bench/peers.txt. Each runs in a process of its own, on the same data, with its files in
the page cache. The processes take turns: a round is one measurement of every library, and ratios are taken
within a round.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench import storage_rows
from tools.bench.peers import Library, peer_python
from tools.bench.results import ROOT, Row, write_results
from tools.bench.storage_data import FULL, QUICK, Sizes, make_data
from tools.bench.storage_single import first_batch_rows, large_index_rows

_OWN = ("ours", "bare_numpy")
_PACKAGES = ("unirl", "numpy", "pyarrow", "lmdb", "duckdb", "xxhash")
_EPOCH_PEERS = ("lance_dataset", "mds", "lit", "hugging_face", "tars")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Tasks that are compared: (module, task) each, on the files in one folder."""

    folder: str
    contenders: Sequence[tuple[str, str]]
    rows: Callable[[storage_rows.Measured], list[Row]]


SECTIONS = {
    "epoch64": Section(
        folder="images64",
        contenders=[
            ("ours", "epoch64"),
            ("ours", "consecutive"),
            ("bare_numpy", "epoch64"),
            *((module, "epoch64") for module in _EPOCH_PEERS),
            ("lit", "epoch64_bytes"),
        ],
        rows=lambda measured: storage_rows.epoch_rows(measured, "epoch64", "3x64x64", peer_factor=15),
    ),
    "epoch224": Section(
        folder="images224",
        contenders=[
            *((module, "epoch224") for module in ("ours", "bare_numpy", *_EPOCH_PEERS)),
            ("lit", "epoch224_bytes"),
        ],
        rows=lambda measured: storage_rows.epoch_rows(measured, "epoch224", "3x224x224", peer_factor=3),
    ),
    "lookup": Section(
        folder="vectors",
        contenders=[
            (module, "lookup")
            for module in ("ours", "lmdb_file", "bare_numpy", "sqlite_file", "lance_dataset")
        ],
        rows=storage_rows.lookup_rows,
    ),
    "filter": Section(
        folder="vectors",
        contenders=[
            ("ours", "filter"),
            ("duckdb_file", "filter"),
            ("duckdb_file", "filter_own"),
            ("lance_dataset", "filter"),
            ("arrow_file", "filter"),
            ("sqlite_file", "filter"),
        ],
        rows=storage_rows.filter_rows,
    ),
    "write": Section(
        folder="pictures",
        contenders=[
            (module, "write")
            for module in (
                "ours",
                "lmdb_file",
                "sqlite_file",
                "lance_dataset",
                "mds",
                "lit",
                "hugging_face",
                "tars",
            )
        ],
        rows=storage_rows.write_rows,
    ),
}


def main() -> None:
    """Run the sections and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small data and one round, to see that it runs")
    parser.add_argument(
        "--rounds", type=int, help="measured rounds (3; 1 with --quick), after one to warm up"
    )
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, "open", "large"], metavar="SECTION")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "bench" / "storage")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    rounds = options.rounds or (1 if options.quick else 3)
    folder = options.data / ("quick" if options.quick else "full")
    python = peer_python(options.data)
    make_data(folder / "data", sizes)
    rows: list[Row] = []
    notes = list(storage_rows.NOTES)
    for name in options.only or [*SECTIONS, "open", "large"]:
        started = time.perf_counter()
        rows += _run(name, folder, sizes, python, rounds, notes)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    notes.append(f"The others: {_versions(python)}.")
    if options.quick or options.only:
        print("\n".join(map(str, [*rows, *notes])))
    else:
        path = write_results("storage", rows, notes=notes, packages=_PACKAGES)
        print(path.with_suffix(".md").read_text())


def _run(name: str, folder: Path, sizes: Sizes, python: Path, rounds: int, notes: list[str]) -> list[Row]:
    if name == "open":
        return first_batch_rows(folder / "shards", sizes.shards, rounds)
    if name == "large":
        return large_index_rows(folder / "large", sizes.large, rounds)
    section = SECTIONS[name]
    measured, failures = measure(section, folder, python, rounds)
    notes += [f"{name}: {failure}" for failure in failures]
    return section.rows(measured)


def measure(
    section: Section, folder: Path, python: Path, rounds: int
) -> tuple[storage_rows.Measured, list[str]]:
    """The answers of each contender that works, one a round, and what went wrong with the others.

    Raises:
        RuntimeError: If our own part fails; the log beside the files has the traceback.
    """
    log = folder / f"{section.folder}.log"
    libraries: dict[str, Library] = {}
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failures = []
    try:
        for module, task in section.contenders:
            if module not in libraries:
                interpreter = Path(sys.executable) if module in _OWN else python
                libraries[module] = Library(interpreter, module, log)
            variant = task.partition("_")[2]
            files = folder / section.folder / (f"{module}_{variant}" if variant else module)
            answer = libraries[module].ask("open", task, data=str(folder / "data"), folder=str(files))
            if "error" in answer:
                failures.append(_failure(module, answer, log))
            else:
                measured[module, task] = []
        for number in range(rounds + 1):
            turns = list(measured)
            for module, task in turns[number % len(turns) :] + turns[: number % len(turns)]:
                answer = libraries[module].ask("run", task, round=number)
                if "error" in answer:
                    failures.append(_failure(module, answer, log))
                    del measured[module, task]
                elif number:
                    measured[module, task].append(answer)
    finally:
        for library in libraries.values():
            library.close()
        shutil.rmtree(folder / "pictures", ignore_errors=True)
    return measured, failures


def _failure(module: str, answer: dict[str, Any], log: Path) -> str:
    text = f"{module} failed: {answer['error']}"
    if module in _OWN:
        raise RuntimeError(f"{text}; see {log}")
    return text


def _versions(python: Path) -> str:
    names = [
        "pylance",
        "mosaicml-streaming",
        "litdata",
        "datasets",
        "webdataset",
        "lmdb",
        "duckdb",
        "pyarrow",
        "torch",
    ]
    script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", script, *names], capture_output=True, text=True, check=True)
    return ", ".join(f"{name} {text}" for name, text in zip(names, found.stdout.split()))


if __name__ == "__main__":
    main()
