"""One self-contained HTML page about a run: no network, no server, readable on a phone."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pyarrow as pa
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from unirl.explore import plots
from unirl.explore.gallery import Card, cards, samples_over_time
from unirl.explore.health import data_health
from unirl.explore.results import stage_results, stage_times
from unirl.explore.run import Run, number, open_run
from unirl.explore.scores import Scores

__all__ = ["render_report", "write_report"]

_MAX_COMPONENTS = 12
_UNKNOWN = "–"  # noqa: RUF001


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
    environment.filters |= {
        "percent": _percent,
        "points": _points,
        "figure": _figure,
        "fixed": _fixed,
        "duration": _duration,
        "size": _size,
    }
    script = environment.get_template("gallery_filter.html.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return environment.get_template("report.html.j2").render(
        run=run,
        title=str(run.header.get("recipe") or run.path.resolve().name),
        name=run.path.resolve().name,
        facts=_facts(run),
        config=json.dumps(run.header.get("config", {}), indent=2, ensure_ascii=False, default=str),
        results=stage_results(run),
        times=stage_times(run),
        curves=_svgs(_curves(run)),
        evaluations=_svgs(plots.reward_and_judge(run, direction) for direction in run.directions),
        components=_svgs(_components(run.scores)) if run.scores else [],
        agreement=_agreement(run.scores) if run.scores else [],
        galleries=_galleries(run.scores) if run.scores else [],
        disputed=_disputed(run.scores) if run.scores else [],
        resources=_svgs(_resources(run)),
        health=data_health(run.data) if run.data else None,
        last_metrics=_last_metrics(run),
        peak_memory=_peak_memory(run),
        script=Markup(script),
        script_hash=digest,
    )


def figure_svg(figure: Figure, salt: str) -> Markup:
    """Return a figure as an inline SVG that takes its colours and font from the page.

    Args:
        figure: Drawn with `plots.INK` and `plots.GRID` where it should follow the page.
        salt: Another text for each figure of a page, so that the ids inside differ.

    Returns:
        Markup, since Matplotlib escapes every text in it.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace(plots.INK, "currentColor").replace(plots.GRID, "var(--grid)")
    return Markup(svg)


def _svgs(figures: Iterable[Figure]) -> list[Markup]:
    made: list[Markup] = []
    for figure in figures:
        title = figure.axes[0].get_title(loc="left")
        made.append(figure_svg(figure, f"{len(made)} {title}"))
    return made


def _curves(run: Run) -> Iterable[Figure]:
    if not run.train:
        return
    yield plots.learning_curve(run, "reward/mean")
    for prefix, title in (("kl/", "KL, nats per token"), ("entropy/", "entropy, nats per token")):
        if plots.metric_names(run, prefix):
            yield plots.metric_curves(run, prefix, title=title)
    for name in ("policy/clip_fraction", "policy/loss", "value/loss"):
        if plots.metric_names(run, name):
            yield plots.learning_curve(run, name)


def _components(scores: Scores) -> Iterable[Figure]:
    if not len(scores):
        return
    for name in [name for name in scores.measures if name != "judge"][:_MAX_COMPONENTS]:
        yield plots.component_over_steps(scores, name)
        yield plots.component_histogram(scores, name)


def _resources(run: Run) -> Iterable[Figure]:
    if plots.metric_names(run, "time/"):
        yield plots.phase_times(run)
    if plots.metric_names(run, "memory/"):
        yield plots.memory_use(run)


def _agreement(scores: Scores) -> list[dict[str, Any]]:
    """How well the reward and its components agree with the judge, stage by stage."""
    return [row for row in scores.agreement().to_pylist() if row["second"] == "judge"]


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


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else _UNKNOWN


def _points(value: float) -> str:
    return f"{100 * value:+.1f} points" if math.isfinite(value) else "no change known"


def _figure(value: object) -> str:
    if isinstance(value, int | float) and math.isfinite(value):
        return f"{value:.3g}"
    return _UNKNOWN


def _fixed(value: float | None) -> str:
    return _UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return _UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if math.isfinite(num_bytes) else _UNKNOWN
