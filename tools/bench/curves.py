"""Learning curves of every algorithm on the shapes recipe, from one warm-up a seed.

python -m tools.bench.curves [--seeds 1] [--steps 10] [--algorithm ppo grpo ...] [--quick]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from accelerate import Accelerator
from matplotlib.figure import Figure

from recipes.shapes import shapes
from tools.bench.results import Row, write_results
from unirl.config import replace_settings
from unirl.trainer.prepare import prepare_run
from unirl.trainer.recipe import Recipe
from unirl.trainer.run import run_recipe
from unirl.trainer.stages import AlgorithmName
from unirl.types import Direction

Curves = dict[str, list[dict[Direction, list[float]]]]
"""By algorithm, one a seed: the mean reward of every step."""
QUICK = (
    *("data.num_sft=64", "data.num_rl=40", "data.num_eval=32", "num_evaluation_prompts=6"),
    *("tokenizer.steps=8", "sft.steps=6", "reward.steps=6", "tokenizer.batch_size=16", "sft.batch_size=16"),
    *("reward.batch_size=16", "settings.micro_prompts=4"),
    *(f"{stage}.{setting}" for stage in ("text", "image") for setting in (
        "prompts_per_step=4", "group_size=2"
    )),
)  # fmt: skip


def main() -> None:
    """Train with every algorithm, then write the data, the picture and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="of each of the two stages")
    parser.add_argument("--algorithm", nargs="+", choices=get_args(AlgorithmName), help="only these")
    parser.add_argument("--quick", action="store_true", help="two steps on a few pictures, nothing written")
    options = parser.parse_args()
    algorithms = options.algorithm or get_args(AlgorithmName)
    settings = [f"{stage}.steps={2 if options.quick else options.steps}" for stage in ("text", "image")]
    settings += QUICK if options.quick else ()
    runs: dict[str, list[Path]] = {algorithm: [] for algorithm in algorithms}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            warm = Path(folder) / f"seed{seed}"
            warm.mkdir()
            prepare_run(_recipe(seed, settings), warm, seed=seed)
            for algorithm in algorithms:
                started = time.perf_counter()
                run = Path(folder) / f"{algorithm}-seed{seed}"
                shutil.copytree(warm, run)
                train(_recipe(seed, settings, algorithm), run)
                runs[algorithm].append(run)
                print(f"{algorithm}, seed {seed}: {time.perf_counter() - started:.0f} s", flush=True)
        lines = {name: [_lines(run) for run in paths] for name, paths in runs.items()}
    curves = {name: [_curve(run) for run in found] for name, found in lines.items()}
    rows = [row for name in algorithms for row in _rows(name, curves[name], lines[name])]
    if options.quick:
        print("\n".join(map(str, rows)))
        return
    path = write_results("curves", rows, notes=[NOTE])
    path.with_name("curves-data.json").write_text(json.dumps(curves, indent=1) + "\n")
    draw(curves, path.with_suffix(".png"))
    print(path.with_suffix(".md").read_text())


NOTE = (
    "Mean over seeds; every algorithm starts from the same warm policy and draws the same prompts. Reward "
    "gain: mean of the last three steps less that of the first three, over training prompts. Judge gain: "
    "after the stage less before it, on held-out prompts. The settings are the recipe's, chosen for PPO. "
    "![curves](curves.png) shows each step; the numbers are in curves-data.json."
)


def train(recipe: Recipe, run: Path) -> None:
    """Both stages of a run that is prepared."""
    run_recipe(recipe, run, accelerator=Accelerator(cpu=True))


def draw(curves: Curves, path: Path) -> None:
    """One panel a direction, one line an algorithm: the mean over seeds, with their range as a band."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True)
    directions: tuple[Direction, ...] = ("text", "image")
    for panel, direction in zip(panels, directions, strict=True):
        for name, seeds in curves.items():
            values = np.array([seed[direction] for seed in seeds])
            steps = np.arange(1, values.shape[1] + 1)
            (line,) = panel.plot(steps, values.mean(axis=0), label=name, linewidth=1.4)
            if len(values) > 1:
                panel.fill_between(
                    steps, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.15
                )
        panel.set(title=f"stage {direction}", xlabel="step", ylabel="mean reward of the step")
        panel.grid(alpha=0.3)
    panels[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(path, dpi=110)


def _recipe(seed: int, settings: Sequence[str], algorithm: str = "ppo") -> Recipe:
    chosen = [f"{stage}.algorithm={algorithm}" for stage in ("text", "image")]
    return replace_settings(shapes(seed=seed), [*settings, *chosen])


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _curve(lines: Sequence[Mapping[str, Any]]) -> dict[Direction, list[float]]:
    curve: dict[Direction, list[float]] = {"text": [], "image": []}
    for line in lines:
        if line["kind"] == "train":
            curve[line["direction"]].append(line["reward/mean"])
    return curve


def _rows(
    name: str, curves: Sequence[Mapping[Direction, Sequence[float]]], lines: Sequence[Sequence[Any]]
) -> list[Row]:
    """Gains of reward and judge in each direction, and the alarms of all runs."""
    rows = []
    directions: tuple[Direction, ...] = ("text", "image")
    for direction in directions:
        gains = [float(np.mean(c[direction][-3:]) - np.mean(c[direction][:3])) for c in curves]
        rows.append(_row(f"{name}: {direction}/reward gain in training", gains))
        judged = [_judge_gain(run, direction) for run in lines]
        rows.append(_row(f"{name}: {direction}/judge gain on held-out prompts", judged))
    alarms = [float(sum(line["kind"] == "alarm" for line in run)) for run in lines]
    return [*rows, _row(f"{name}: alarms", alarms, target="0", holds=not any(alarms))]


def _judge_gain(lines: Sequence[Mapping[str, Any]], direction: Direction) -> float:
    """What the stage of a direction changed."""
    order = ["start", "text", "image"]
    found = {
        line["stage"]: line["eval/judge"]
        for line in lines
        if line["kind"] == "eval" and line["direction"] == direction
    }
    return float(found[direction] - found[order[order.index(direction) - 1]])


def _row(
    metric: str, values: Sequence[float], *, target: str | None = None, holds: bool | None = None
) -> Row:
    return Row(
        metric=metric,
        value=float(np.mean(values)),
        unit="",
        runs=len(values),
        min=min(values),
        max=max(values),
        target=target,
        holds=holds,
    )


if __name__ == "__main__":
    main()
