"""Everything that takes long: python -m tools.soak (about an hour; --scale 0.1 for a tenth of it)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _program(name: str, *arguments: object) -> Callable[[], None]:
    """Another program of this package, in a process of its own, which keeps this one free of threads."""

    def run() -> None:
        command = [sys.executable, "-m", f"tools.soak.{name}", *map(str, arguments)]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    return run


def main() -> None:
    """Run all soaks one after the other; the summary tells which held, and the exit code whether all did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full length")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    def scaled(count: int) -> int:
        return max(1, round(count * given.scale))

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "killed"
        soaks = {
            "kills": _program("kills", "--kills", scaled(200), "--seed", given.seed, "--path", path),
            "full disk": _program("filling", "--tries", scaled(100)),
            "little memory": _program(
                "memory", "--store-mib", max(192, scaled(2048)), "--limit-mib", max(96, scaled(512))
            ),
            "large values": _program("large", "--pieces", max(2, scaled(17))),
            "contention": _program("contention", "--rounds", scaled(20), "--seed", given.seed),
            "state machine": _program("model", "--examples", scaled(600), "--seed", given.seed),
        }
        rows = [(name, *_timed(name, soak)) for name, soak in soaks.items()]
    print("\nsummary")
    for name, held, seconds in rows:
        print(f"  {name:14} {'held' if held else 'FAILED'} after {seconds:.0f} s")
    sys.exit(not all(held for _, held, _ in rows))


def _timed(name: str, soak: Callable[[], None]) -> tuple[bool, float]:
    print(f"\n== {name}", flush=True)
    begin = time.monotonic()
    try:
        soak()
    except subprocess.CalledProcessError as error:
        print(f"{name} ended with code {error.returncode}", flush=True)
        return False, time.monotonic() - begin
    return True, time.monotonic() - begin


if __name__ == "__main__":
    main()
