"""What every benchmark leaves behind: numbers with the machine, the versions and the command."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

__all__ = ["Row", "write_results"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("unirl", "torch", "transformers", "accelerate", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number beside what it is compared with."""

    metric: str
    value: float
    """Mean over the runs."""
    unit: str
    runs: int
    min: float
    max: float
    peer: str | None = None
    """What `peer_value` was measured on."""
    peer_value: float | None = None
    ratio: float | None = None
    target: str | None = None
    holds: bool | None = None


def write_results(name: str, rows: Sequence[Row], *, notes: Sequence[str] = ()) -> Path:
    """Write `benchmarks/NAME.json` and `benchmarks/NAME.md`; return the former."""
    directory = ROOT / "benchmarks"
    directory.mkdir(exist_ok=True)
    python = platform.python_version()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {python}"
    command = " ".join(["python", "-m", f"tools.bench.{name}", *sys.argv[1:]])
    versions = {package: version(package) for package in PACKAGES}
    record = {
        "machine": machine,
        "versions": versions,
        "command": command,
        "rows": [asdict(row) for row in rows],
    }
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**record, "notes": list(notes)}, indent=1) + "\n")
    lines = [
        f"# {name}",
        "",
        f"`{command}` on {machine}; " + ", ".join(f"{p} {v}" for p, v in versions.items()) + ".",
        "",
        "| metric | mean | lowest | highest | runs | compared with | its value | target | holds |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in rows),
        *(f"\n{note}" for note in notes),
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return path


def _line(row: Row) -> str:
    holds = "" if row.holds is None else "yes" if row.holds else "no"
    peer_value = "" if row.peer_value is None else f"{row.peer_value:.3g} {row.unit}"
    cells = (
        row.metric,
        f"{row.value:.3g} {row.unit}",
        f"{row.min:.3g}",
        f"{row.max:.3g}",
        str(row.runs),
        row.peer or "",
        peer_value,
        row.target or "",
        holds,
    )
    return "| " + " | ".join(cells) + " |"
