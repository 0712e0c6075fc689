"""What every benchmark leaves behind: numbers with the machine, the versions and the command."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

__all__ = ["ROOT", "Row", "median_row", "write_results"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("unirl", "torch", "transformers", "accelerate", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number beside what it is compared with."""

    metric: str
    value: float
    """Mean over the runs, or their median where `ratio_min` is given."""
    unit: str
    runs: int
    min: float
    max: float
    peer: str | None = None
    """What `peer_value` was measured on."""
    peer_value: float | None = None
    ratio: float | None = None
    """value / peer_value; as a median, that of the ratios of each round."""
    ratio_min: float | None = None
    ratio_max: float | None = None
    target: str | None = None
    holds: bool | None = None


def median_row(
    metric: str,
    values: Sequence[float],
    unit: str,
    *,
    peer: str | None = None,
    peer_values: Sequence[float] | None = None,
    target: str | None = None,
    holds: bool | None = None,
) -> Row:
    """A row of medians. Equal positions of `values` and `peer_values` are one round and give a ratio."""
    ratios = [mine / theirs for mine, theirs in zip(values, peer_values or [])]
    return Row(
        metric=metric,
        value=statistics.median(values),
        unit=unit,
        runs=len(values),
        min=min(values),
        max=max(values),
        peer=peer,
        peer_value=statistics.median(peer_values) if peer_values else None,
        ratio=statistics.median(ratios) if ratios else None,
        ratio_min=min(ratios) if ratios else None,
        ratio_max=max(ratios) if ratios else None,
        target=target,
        holds=holds,
    )


def write_results(
    name: str, rows: Sequence[Row], *, notes: Sequence[str] = (), packages: Sequence[str] = PACKAGES
) -> Path:
    """Write `benchmarks/NAME.json` and `benchmarks/NAME.md`; return the former."""
    directory = ROOT / "benchmarks"
    directory.mkdir(exist_ok=True)
    python = platform.python_version()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {python}"
    command = " ".join(["python", "-m", f"tools.bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    versions = {package: version(package) for package in packages}
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
        "| metric | value | lowest | highest | runs | compared with | its value | ratio | target | holds |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in rows),
        *(f"\n{note}" for note in notes),
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return path


def _line(row: Row) -> str:
    holds = "" if row.holds is None else "yes" if row.holds else "no"
    peer_value = "" if row.peer_value is None else f"{_short(row.peer_value)} {row.unit}"
    cells = (
        row.metric,
        f"{_short(row.value)} {row.unit}",
        _short(row.min),
        _short(row.max),
        str(row.runs),
        row.peer or "",
        peer_value,
        _ratio(row),
        row.target or "",
        holds,
    )
    return "| " + " | ".join(cells) + " |"


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return ""
    spread = (
        ""
        if row.ratio_min is None or row.ratio_max is None
        else f" ({row.ratio_min:.3g}-{row.ratio_max:.3g})"
    )
    return f"{row.ratio:.3g}{spread}"


def _short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
