"""One self-contained HTML page about a run: no network, no server, readable on a phone."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from storage import FeatureStore, StorageError
from unirl.explore import formatting, plots
from unirl.explore.gallery import Card, cards, samples_over_time
from unirl.explore.health import DataHealth, data_health
from unirl.explore.results import headlines, stage_times
from unirl.explore.run import Run, number, open_run
from unirl.explore.run_alarms import run_alarms
from unirl.explore.scores import Scores
from unirl.explore.svg import figure_svg

__all__ = ["render_report", "write_report"]

_CURVES = (
    "reward/mean",
    "kl/reference",
    "kl/coef",
    "policy/clip_fraction",
    "policy/loss",
    "value/loss",
    "rollout/length",
)
_MAX_COMPONENTS = 12


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    The page shows what there is: it can be written at any moment of a run, and says what is missing.
    Pictures and figures are part of the file, and nothing in it is loaded from elsewhere.

    Raises:
        ConfigError: If the directory does not exist or holds nothing of a run.
    """
    page = render_report(open_run(run_dir))
    path = Path(run_dir) / "report.html"
    part = path.with_name(f".report.{os.getpid()}.html")
    part.write_text(page, encoding="utf-8")
    part.replace(path)
    return path


def render_report(run: Run) -> str:
    """Return the page as HTML. Everything that comes from the run is escaped."""
    environment = Environment(
        loader=PackageLoader("unirl", "explore"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(formatting, name) for name in formatting.__all__}
    script = environment.get_template("gallery_filter.html.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    notes = list(run.notes)
    return environment.get_template("report.html.j2").render(
        run=run,
        notes=notes,
        title=str(run.header.get("recipe") or run.path.resolve().name),
        name=run.path.resolve().name,
        facts=_facts(run),
        config=json.dumps(run.header.get("config", {}), indent=2, ensure_ascii=False, default=str),
        headlines=headlines(run),
        times=stage_times(run),
        curves=_svgs(_curves(run)),
        evaluations=_svgs(plots.reward_and_judge(run, direction) for direction in run.directions),
        resources=_svgs(_resources(run)),
        health=_health(run.data, notes),
        alarms=run_alarms(run).to_pylist(),
        **_scored(run.scores, notes),
        last_metrics=_last_metrics(run),
        peak_memory=_peak_memory(run),
        script=Markup(script),
        script_hash=digest,
    )


def _svgs(figures: Iterable[Figure]) -> list[Markup]:
    made: list[Markup] = []
    for figure in figures:
        title = figure.axes[0].get_title(loc="left")
        made.append(figure_svg(figure, f"{len(made)} {title}"))
    return made


def _curves(run: Run) -> Iterable[Figure]:
    for name in _CURVES:
        if plots.metric_names(run, name):
            yield plots.learning_curve(run, name)
    if plots.metric_names(run, "entropy/"):
        yield plots.metric_curves(run, "entropy/", title="entropy, nats per token")


def _scored(scores: Scores | None, notes: list[str]) -> dict[str, list[Any]]:
    """The sections that come from the experience store; empty where there is none or it is damaged."""
    if scores is not None:
        try:
            return {
                "components": _svgs(_components(scores)),
                "agreement": _agreement(scores),
                "galleries": _galleries(scores),
                "disputed": _disputed(scores),
            }
        except StorageError as error:
            notes.append(f"The experience cannot be read, so there are no galleries: {error}.")
    return {"components": [], "agreement": [], "galleries": [], "disputed": []}


def _health(data: FeatureStore | None, notes: list[str]) -> DataHealth | None:
    if data is not None:
        try:
            return data_health(data)
        except StorageError as error:
            notes.append(f"The data store cannot be read, so the health of the data is not shown: {error}.")
    return None


def _components(scores: Scores) -> Iterable[Figure]:
    if not len(scores):
        return
    for name in _measures(scores)[:_MAX_COMPONENTS]:
        yield plots.component_over_steps(scores, name)
        yield plots.component_histogram(scores, name)


def _measures(scores: Scores) -> tuple[str, ...]:
    """The reward and its components; a single component is the reward and is not shown again."""
    return ("reward",) if len(scores.components) == 1 else ("reward", *scores.components)


def _resources(run: Run) -> Iterable[Figure]:
    if plots.metric_names(run, "time/"):
        yield plots.phase_times(run)
    if plots.metric_names(run, "memory/"):
        yield plots.memory_use(run)


def _agreement(scores: Scores) -> list[dict[str, Any]]:
    """How well the reward and its components agree with the judge, stage by stage."""
    shown = _measures(scores)
    rows = scores.agreement().to_pylist()
    return [row for row in rows if row["second"] == "judge" and row["first"] in shown]


def _galleries(scores: Scores) -> list[tuple[str, str, int, list[Card]]]:
    """Cards grouped by kind, stage and step, evaluations first."""
    groups: dict[tuple[str, str, int], list[Card]] = {}
    for kind in ("eval", "train"):
        for card in cards(scores, samples_over_time(scores, kind=kind)):
            groups.setdefault((card.kind, card.stage, card.step), []).append(card)
    return [(kind, stage, step, found) for (kind, stage, step), found in groups.items()]


def _disputed(scores: Scores, n: int = 6) -> list[tuple[str, list[Card]]]:
    """Samples on which reward and judge differ most: the first places to look for a flaw of either."""
    if "judge" not in scores.columns:
        return []
    found: Sequence[tuple[str, pa.Table]] = (
        ("Rewarded most among those that the judge rejects", scores.where("judge = 0").best(n)),
        ("Rewarded least among those that the judge accepts", scores.where("judge = 1").worst(n)),
    )
    return [(title, cards(scores, table)) for title, table in found if table.num_rows]


def _facts(run: Run) -> list[tuple[str, str]]:
    """Name and text of what is needed to repeat the run."""
    header = run.header
    versions = header.get("versions")
    shown = {
        "recipe": header.get("recipe"),
        "seed": header.get("seed"),
        "started": header.get("created"),
        "data": header.get("store"),
        "snapshot": header.get("snapshot"),
        "commit": header.get("commit"),
        "versions": (
            ", ".join(f"{name} {version}" for name, version in versions.items())
            if isinstance(versions, dict)
            else versions
        ),
    }
    return [(name, str(value)) for name, value in shown.items() if value not in (None, "")]


def _last_metrics(run: Run) -> list[tuple[str, list[float]]]:
    """The last finite value of every training metric in each stage."""
    found = []
    for name in plots.metric_names(run, ""):
        if name in {"step", "stage_step", "wall_s"}:
            continue
        row = []
        for stage in run.stages:
            lines = [line for line in run.train if line.get("stage") == stage]
            values = [value for line in lines if math.isfinite(value := number(line, name))]
            row.append(values[-1] if values else math.nan)
        found.append((name, row))
    return found


def _peak_memory(run: Run) -> float:
    value = number(run.summary, "peak_memory_bytes")
    if math.isfinite(value):
        return value
    values = [number(line, name) for name in plots.metric_names(run, "memory/") for line in run.train]
    return max((value for value in values if math.isfinite(value)), default=math.nan)
