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
from unirl.explore.provenance import recorded_facts, repeating_commands
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
_MODALITIES = ("text", "image")
_MAX_COMPONENTS = 12


def write_report(run_dir: str | Path, *, others: Iterable[str | Path] = ()) -> Path:
    """Write `report.html` into a run directory and return its path.

    The page shows what there is: it can be written at any moment of a run, and says what is missing.
    Pictures and figures are part of the file, and nothing in it is loaded from elsewhere.

    Args:
        run_dir: The run that the page is about.
        others: Run directories of the same recipe with other seeds, drawn into its curves as a band.

    Raises:
        ConfigError: If a directory does not exist or holds nothing of a run.
    """
    page = render_report(open_run(run_dir), others=[open_run(other) for other in others])
    path = Path(run_dir) / "report.html"
    part = path.with_name(f".report.{os.getpid()}.html")
    part.write_text(page, encoding="utf-8")
    part.replace(path)
    return path


def render_report(run: Run, *, others: Sequence[Run] = (), live_version: str = "") -> str:
    """Return the page as HTML. Everything that comes from the run is escaped.

    Args:
        run: The run that the page is about.
        others: Runs of the same recipe with other seeds.
        live_version: What the server of the page answers to `version` while nothing has changed; the page
            then asks for it every few seconds. "" gives a page that asks for nothing.
    """
    environment = Environment(
        loader=PackageLoader("unirl", "explore"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(formatting, name) for name in formatting.__all__}
    names = ["gallery_filter.html.j2"] + (["live.html.j2"] if live_version else [])
    scripts = [environment.get_template(name).render(version=live_version) for name in names]
    notes = list(run.notes)
    scored = _scored(run, notes)
    return environment.get_template("report.html.j2").render(
        run=run,
        notes=notes,
        title=str(run.header.get("recipe") or run.path.resolve().name),
        name=run.path.resolve().name,
        others=others,
        facts=recorded_facts(run.header),
        repeat="\n".join(repeating_commands(run.header)),
        config=json.dumps(run.header.get("config", {}), indent=2, ensure_ascii=False, default=str),
        headlines=headlines(run, others),
        times=stage_times(run),
        curves=_svgs(_curves(run, others)),
        evaluations=_svgs(plots.reward_and_judge(run, name, others=others) for name in run.directions),
        resources=_svgs(_resources(run)),
        health=_health(run.data, notes),
        alarms=run_alarms(run).to_pylist(),
        **scored,
        prompts=_prompts(scored["galleries"]),
        last_metrics=_last_metrics(run),
        peak_memory=_peak_memory(run),
        scripts=[Markup(script) for script in scripts],
        script_hashes=[_digest(script) for script in scripts],
        is_live=bool(live_version),
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _svgs(figures: Iterable[Figure]) -> list[Markup]:
    made: list[Markup] = []
    for figure in figures:
        title = figure.axes[0].get_title(loc="left")
        made.append(figure_svg(figure, f"{len(made)} {title}"))
    return made


def _curves(run: Run, others: Sequence[Run]) -> Iterable[Figure]:
    for name in _CURVES:
        if plots.metric_names(run, name):
            yield plots.learning_curve(run, name, others=others)
    for prefix in ("kl/", "entropy/"):
        if any(plots.metric_names(run, f"{prefix}{modality}") for modality in _MODALITIES):
            title = f"{prefix.rstrip('/')} by modality, nats per token"
            yield plots.metric_curves(run, prefix, labels=_MODALITIES, title=title)


def _scored(run: Run, notes: list[str]) -> dict[str, list[Any]]:
    """The sections that come from the experience store; empty where there is none or it is damaged."""
    scores = run.scores
    if scores is not None:
        try:
            return {
                "components": _svgs(_components(scores)),
                "agreement": _agreement(scores),
                "galleries": _galleries(scores, run.data),
                "disputed": _disputed(scores, run.data),
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


def _galleries(scores: Scores, data: FeatureStore | None) -> list[tuple[str, str, int, list[Card]]]:
    """Cards grouped by kind, stage and step, evaluations first."""
    groups: dict[tuple[str, str, int], list[Card]] = {}
    for kind in ("eval", "train"):
        for card in cards(scores, samples_over_time(scores, kind=kind), data=data):
            groups.setdefault((card.kind, card.stage, card.step), []).append(card)
    return [(kind, stage, step, found) for (kind, stage, step), found in groups.items()]


def _prompts(galleries: Iterable[tuple[str, str, int, list[Card]]]) -> list[tuple[str, str]]:
    """Key and words of each prompt in the galleries, by words."""
    words = {it.prompt: it.asked or it.target or it.prompt for *_, found in galleries for it in found}
    return sorted(words.items(), key=lambda item: (item[1], item[0]))


def _disputed(scores: Scores, data: FeatureStore | None, n: int = 6) -> list[tuple[str, list[Card]]]:
    """Samples on which reward and judge differ most: the first places to look for a flaw of either."""
    if "judge" not in scores.columns:
        return []
    found: Sequence[tuple[str, pa.Table]] = (
        ("Rewarded most among those that the judge rejects", scores.where("judge = 0").best(n)),
        ("Rewarded least among those that the judge accepts", scores.where("judge = 1").worst(n)),
    )
    return [(title, cards(scores, table, data=data)) for title, table in found if table.num_rows]


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
