"""The demo over several seeds: does RL help on held-out numbers, in both stages, as the judge sees it?

Into benchmarks/RECIPE.json, or RECIPE-ALGORITHM.json for other algorithms than the recipe's own.

python -m tools.bench.numbers [--seeds 3] [--recipe numbers] [--algorithm ppo grpo] [--set PATH=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tools.bench.results import ROOT, Row, write_results
from unirl.trainer.stages import AlgorithmName

STAGES = ("text", "image")


def main() -> None:
    """Run the recipe once a seed, each in a process and a run directory of its own, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="numbers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--algorithm", nargs="+", choices=get_args(AlgorithmName), default=["ppo"])
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    options = parser.parse_args()
    rows: list[Row] = []
    notes: list[str] = []
    for algorithm in options.algorithm:
        summaries = [_summary(options, algorithm, seed) for seed in range(options.seeds)]
        prefix = "" if len(options.algorithm) == 1 else f"{algorithm}: "
        for i in range(len(summaries[0]["runs"])):
            rows += _stage_rows([s["runs"][i] for s in summaries], prefix)
        rows += _cost_rows(summaries, prefix)
        notes.append(f"{prefix}\n\n{_seed_table(summaries)}" if prefix else _seed_table(summaries))
    others = [algorithm for algorithm in options.algorithm if algorithm != "ppo"]
    path = write_results("-".join([options.recipe, *others]), rows, notes=notes)
    print(path.with_suffix(".md").read_text())


def _summary(options: argparse.Namespace, algorithm: str, seed: int) -> dict[str, Any]:
    """Run the recipe with one algorithm and one seed."""
    name = options.recipe if algorithm == "ppo" else f"{options.recipe}-{algorithm}"
    run = options.runs / f"{name}-seed{seed}"
    command = [sys.executable, "-m", f"recipes.{options.recipe}", "--run", str(run), "--seed", str(seed)]
    settings = [*(f"{stage}.algorithm={algorithm}" for stage in STAGES), *options.set]
    started = time.perf_counter()
    subprocess.run([*command, *(f"--set={item}" for item in settings)], check=True, cwd=ROOT)
    print(f"{algorithm}, seed {seed}: {time.perf_counter() - started:.0f} s")
    return json.loads((run / "summary.json").read_text())


def _stage_rows(runs: Sequence[dict[str, Any]], prefix: str) -> list[Row]:
    """Judge and reward of one stage on held-out prompts, before and after, and the gain seed by seed."""
    rows = []
    stage = f"{prefix}{runs[0]['stage']}"
    for measure in ("judge", "reward"):
        before = [run[f"{measure}_before"] for run in runs]
        after = [run[f"{measure}_after"] for run in runs]
        gains = [b - a for a, b in zip(before, after, strict=True)]
        spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
        rows += [
            _row(f"{stage}/{measure} after", after, peer="before the stage", peer_values=before),
            _row(
                f"{stage}/{measure} gain",
                gains,
                target=f"every seed > 0 and mean > deviation over seeds ({spread:.3f})",
                holds=min(gains) > 0 and statistics.mean(gains) > spread,
            ),
        ]
    return rows


def _cost_rows(summaries: Sequence[dict[str, Any]], prefix: str) -> list[Row]:
    rl_share = [sum(run["wall_s"] for run in s["runs"]) / s["total_wall_s"] for s in summaries]
    return [
        _row(f"{prefix}wall time without installation", [s["total_wall_s"] for s in summaries], unit="s"),
        _row(
            f"{prefix}share of it in RL steps", rl_share, target="at least 1/3", holds=min(rl_share) >= 1 / 3
        ),
        _row(
            f"{prefix}peak memory",
            [s["peak_memory_bytes"] / 2**30 for s in summaries],
            unit="GiB",
            target="under 6",
            holds=all(s["peak_memory_bytes"] < 6 * 2**30 for s in summaries),
        ),
    ]


def _row(
    metric: str,
    values: Sequence[float],
    *,
    unit: str = "",
    peer: str | None = None,
    peer_values: Sequence[float] | None = None,
    target: str | None = None,
    holds: bool | None = None,
) -> Row:
    mean = statistics.mean(values)
    peer_mean = statistics.mean(peer_values) if peer_values else None
    return Row(
        metric=metric,
        value=mean,
        unit=unit,
        runs=len(values),
        min=min(values),
        max=max(values),
        peer=peer,
        peer_value=peer_mean,
        ratio=mean / peer_mean if peer_mean else None,
        target=target,
        holds=holds,
    )


def _seed_table(summaries: Sequence[dict[str, Any]]) -> str:
    lines = ["| seed | stage | judge before | judge after | reward before | reward after | steps | s |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    lines += [
        f"| {run['seed']} | {run['stage']} | {run['judge_before']:.3f} | {run['judge_after']:.3f} "
        f"| {run['reward_before']:.3f} | {run['reward_after']:.3f} | {run['steps']} | {run['wall_s']:.0f} |"
        for summary in summaries
        for run in summary["runs"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
