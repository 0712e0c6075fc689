"""The loader beside a bare loop and other libraries: pictures, tensors, first batch, resume, memory, balance.

python -m tools.bench.loader [--quick] [--rounds 3] [--only SECTION ...] [--no-peers] [--data FOLDER]

Writes benchmarks/loader.json and .md. The peers stand in an environment of their own, which the first run
makes from tools/bench/peers.txt. Each runs in a process of its own, on the same pictures, with its files in
the page cache. The processes take turns: a round is one measurement of every library, and ratios are taken
within a round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench import loader_rows
from tools.bench.loader_data import FULL, QUICK, Sizes, make_data
from tools.bench.loader_single import single_rows
from tools.bench.peers import Library, peer_python
from tools.bench.process_memory import PeakMemory
from tools.bench.results import ROOT, Row, write_results

_OWN = ("ours", "bare_loop", "bare_gather")
_SECTIONS = ("pictures", "tensors", "first", "single")
_PICTURE_PEERS = ("tars", "lit", "mds", "hugging_face", "lance_dataset", "energon")
_FIRST_PEERS = ("tars", "lit", "mds", "energon")
_PACKAGES = ("unirl", "torch", "numpy", "pyarrow", "lmdb", "simplejpeg")
_PEER_PACKAGES = (
    *("webdataset", "litdata", "mosaicml-streaming", "datasets", "pylance", "megatron-energon"),
    *("torch", "simplejpeg", "numpy"),
)


def main() -> None:
    """Run the sections and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small data, one round, no peers")
    parser.add_argument("--rounds", type=int, help="measured rounds (3; 1 with --quick)")
    parser.add_argument("--only", nargs="+", choices=_SECTIONS, metavar="SECTION")
    parser.add_argument("--no-peers", action="store_true", help="leave out the other libraries")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "bench" / "loader")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = QUICK if options.quick else FULL
    rounds = options.rounds or (1 if options.quick else 3)
    folder = options.data / ("quick" if options.quick else "full")
    has_peers = not (options.quick or options.no_peers)
    python = peer_python(ROOT / "runs" / "bench" / "storage") if has_peers else None
    make_data(folder / "data", sizes)
    bench = Bench(folder, sizes, python, rounds)
    for section in options.only or _SECTIONS:
        started = time.perf_counter()
        bench.run(section)
        print(f"{section}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    if python is not None:
        bench.notes.append(f"The others: {_versions(python)}.")
    if options.quick or options.only or options.no_peers:
        print("\n".join(map(str, [*bench.rows, *bench.notes])))
    else:
        path = write_results("loader", bench.rows, notes=bench.notes, packages=_PACKAGES)
        print(path.with_suffix(".md").read_text())


class Bench:
    """The rows and notes so far, and what the sections share."""

    def __init__(self, folder: Path, sizes: Sizes, python: Path | None, rounds: int) -> None:
        self.rows: list[Row] = []
        self.notes = list(loader_rows.NOTES)
        self._folder, self._sizes, self._python, self._rounds = folder, sizes, python, rounds

    def run(self, section: str) -> None:
        """Measure one section."""
        if section == "pictures":
            self.rows += loader_rows.picture_rows(
                self._measure("pictures", ("ours", "bare_loop"), _PICTURE_PEERS)
            )
        elif section == "tensors":
            sides = {
                side: self._measure(f"tensors{side}", ("ours", "bare_gather"), ()) for side in ("64", "224")
            }
            self.rows += loader_rows.tensor_rows(sides)
        elif section == "first":
            measured = self._measure("first", ("ours",), _FIRST_PEERS)
            self.rows += loader_rows.first_rows(measured, self._sizes.shards)
        else:
            store = self._folder / "pictures" / "ours"
            if not (store / "complete").exists():
                self._measure("pictures", ("ours",), ())
            self.rows += single_rows(self._folder, store, self._sizes, self._rounds)

    def _measure(
        self, task: str, own: Sequence[str], peers: Sequence[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """The answers of each contender that works, one a round; notes of what went wrong with the others.

        Raises:
            RuntimeError: If our own part fails; the log beside the files has the traceback.
        """
        data = self._folder / "data" / ("shards" if task == "first" else "")
        log = self._folder / f"{task}.log"
        libraries: dict[str, Library] = {}
        measured: dict[str, list[dict[str, Any]]] = {}
        try:
            for module in [*own, *(peers if self._python else ())]:
                interpreter = Path(sys.executable) if module in _OWN else self._python
                assert interpreter is not None
                files = self._folder / task / module
                details = {"data": str(data), "folder": str(files)}
                if not (files / "complete").exists():
                    # Writing the files leaves memory behind, so another process does it.
                    writer = Library(interpreter, module, log, package="loader_libraries")
                    writer.ask("open", task, **details)
                    writer.close()
                libraries[module] = Library(interpreter, module, log, package="loader_libraries")
                if self._asked(libraries[module], "open", task, log, **details) is not None:
                    measured[module] = []
            for number in range(self._rounds + 1):
                turns = list(measured)
                for module in turns[number % len(turns) :] + turns[: number % len(turns)]:
                    with PeakMemory(libraries[module].pid) as memory:
                        answer = self._asked(libraries[module], "run", task, log, round=number)
                    if answer is None:
                        del measured[module]
                    elif number:
                        measured[module].append({**answer, "peak_bytes": memory.peak_bytes})
        finally:
            for library in libraries.values():
                library.close()
        return measured

    def _asked(
        self, library: Library, do: str, task: str, log: Path, **details: Any
    ) -> dict[str, Any] | None:
        answer = library.ask(do, task, **details)
        if "error" not in answer:
            return answer
        reason = answer["error"].strip().splitlines()[-1]
        text = f"{task}: {library.module} failed: {reason}"
        if library.module in _OWN:
            raise RuntimeError(f"{text}; see {log}")
        self.notes.append(text)
        return None


def _versions(python: Path) -> str:
    script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run(
        [str(python), "-c", script, *_PEER_PACKAGES], capture_output=True, text=True, check=True
    )
    return ", ".join(f"{name} {text}" for name, text in zip(_PEER_PACKAGES, found.stdout.split()))


if __name__ == "__main__":
    main()
