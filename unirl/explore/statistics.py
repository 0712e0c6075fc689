"""How measures move over the steps of a run, and how well they foretell the judge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from unirl.errors import ConfigError
from unirl.explore.condition import nearest_column, quote_name, quote_text
from unirl.explore.scores import Scores

__all__ = ["calibration", "calibration_error", "compared", "drift"]

_LEVELS = [round(0.05 * place, 2) for place in range(1, 20)]
_DRIFT = {
    "stage": pa.string(),
    "direction": pa.string(),
    "measure": pa.string(),
    "step": pa.int64(),
    "num": pa.int64(),
    "mean": pa.float64(),
    "shift": pa.float64(),
    "distance": pa.float64(),
}


def drift(scores: Scores, *, kind: str = "train", measures: Sequence[str] = ()) -> pa.Table:
    """Say how far each measure has moved since the first step of its stage and direction.

    Args:
        scores: The samples to look at.
        kind: "train" or "eval".
        measures: Numeric columns; those of `Scores.measures` unless some are named.

    Returns:
        One row per stage, direction, measure and step: `num` (samples scored), `mean`, `shift` (change of
        the mean in deviations of the first step; null where the first step has none) and `distance`, the
        largest gap between the distribution functions of this step and of the first, read at the 19
        ventiles of the first: 0 for the same distribution, 1 where the two do not touch.

    Source: the two-sample Kolmogorov-Smirnov statistic.
    """
    found: list[dict[str, Any]] = []
    for name in measures or scores.measures:
        _known(scores, name)
        value = f"CAST({quote_name(name)} AS DOUBLE)"
        head = (
            f"WITH x AS (SELECT stage, direction, step, {value} AS v FROM samples "
            f"WHERE kind = {quote_text(kind)} AND isfinite({value})) "
        )
        first = scores.query(
            f"{head}, begun AS (SELECT stage, direction, min(step) AS step FROM x GROUP BY ALL) "
            f"SELECT stage, direction, step, avg(v) AS mean, stddev_samp(v) AS deviation, "
            f"quantile_disc(v, {_LEVELS}) AS levels "
            "FROM x JOIN begun USING (stage, direction, step) GROUP BY ALL ORDER BY step, stage, direction"
        )
        for base in first.to_pylist():
            levels = sorted(set(base["levels"]))
            edges = ", ".join(f"avg((v {sign} {level!r})::INT)" for level in levels for sign in ("<", "<="))
            rows = scores.query(
                f"{head} SELECT step, count(*) AS num, avg(v) AS mean, [{edges}] AS below FROM x "
                f"WHERE stage = {quote_text(base['stage'])} AND direction = {quote_text(base['direction'])} "
                "GROUP BY step ORDER BY step"
            ).to_pylist()
            found += [_moved(name, base, rows[0], row) for row in rows]
    return pa.Table.from_pylist(found, schema=pa.schema(_DRIFT))


def calibration(scores: Scores, measure: str = "reward", *, bins: int = 10) -> pa.Table:
    """Say how often the judge accepts samples at each height of a measure.

    Args:
        scores: The samples; those without the measure or without a verdict are left out.
        measure: A numeric column.
        bins: Most bins; each holds about as many samples, and equal values share one.

    Returns:
        One row per bin, from low to high: `num`, `mean` (of the measure), `accepted` (share that the judge
        accepts) and `low`, `high` (95% interval of that share).

    Raises:
        ConfigError: If there is no such column, or no judge.

    Source: Wilson's score interval, with z = 1.96.
    """
    _known(scores, measure)
    if "judge" not in scores.columns:
        raise ConfigError(f"{scores.store.url}: no judge has seen these samples, so there is no calibration")
    value, verdict = (f"CAST({quote_name(name)} AS DOUBLE)" for name in (measure, "judge"))
    share, z2 = "avg((judge >= 0.5)::INT)", 1.96**2
    middle = f"(accepted + {z2 / 2} / num) / (1 + {z2} / num)"
    half = f"1.96 * sqrt(accepted * (1 - accepted) / num + {z2 / 4} / num / num) / (1 + {z2} / num)"
    return scores.query(f"""
        WITH x AS (SELECT {value} AS v, {verdict} AS judge FROM samples
            WHERE isfinite({value}) AND isfinite({verdict})),
        placed AS (SELECT v, judge,
            floor((rank() OVER (ORDER BY v) - 1) * {int(bins)} / count(*) OVER ()) AS bin FROM x),
        counted AS (SELECT bin, count(*) AS num, avg(v) AS mean, {share} AS accepted FROM placed GROUP BY bin)
        SELECT num, mean, accepted, greatest({middle} - {half}, 0) AS low,
            least({middle} + {half}, 1) AS high
        FROM counted ORDER BY bin""")


def calibration_error(table: pa.Table) -> float:
    """Mean distance between measure and share accepted over the samples of a `calibration`; NaN if empty.

    It means something where the measure is a probability.
    """
    num, mean, accepted = (table[name].to_numpy().astype(np.float64) for name in ("num", "mean", "accepted"))
    return float((num * np.abs(mean - accepted)).sum() / num.sum()) if len(num) else math.nan


def compared(runs: Mapping[str, Scores], *, kind: str = "eval") -> pa.Table:
    """Set two runs or more side by side, at the last step of each stage and direction.

    Args:
        runs: Scores by the name that the run is to have.
        kind: "train" or "eval".

    Returns:
        One row per stage, direction, measure and run: `run`, `step`, `num`, `mean` and `error`, the standard
        error of the mean. Measures that a run does not have are left out.
    """
    tables = []
    for run, scores in runs.items():
        last = scores.query(
            "SELECT stage, direction, max(step) AS step FROM samples "
            f"WHERE kind = {quote_text(kind)} GROUP BY ALL ORDER BY step, stage, direction"
        )
        for place, at in enumerate(last.to_pylist()):
            for number, name in enumerate(scores.measures):
                value = f"CAST({quote_name(name)} AS DOUBLE)"
                tables.append(
                    scores.query(
                        f"SELECT stage, direction, {quote_text(name)} AS measure, {quote_text(run)} AS run, "
                        "step, count(*) AS num, avg(v) AS mean, stddev_samp(v) / sqrt(count(*)) AS error, "
                        f"{place * 1000 + number} AS place FROM (SELECT *, {value} AS v FROM samples) "
                        f"WHERE isfinite(v) AND kind = {quote_text(kind)} AND step = {at['step']} "
                        f"AND stage = {quote_text(at['stage'])} "
                        f"AND direction = {quote_text(at['direction'])} GROUP BY ALL"
                    )
                )
    if not tables:
        raise ConfigError(f"there is no sample of kind {kind!r} in {', '.join(runs) or 'no run'}")
    table = pa.concat_tables(tables, promote_options="permissive")
    ordered = table.append_column(
        "run_place", pa.array([list(runs).index(r) for r in table["run"].to_pylist()])
    )
    return ordered.sort_by([("place", "ascending"), ("run_place", "ascending")]).drop(["place", "run_place"])


def _moved(
    name: str, base: Mapping[str, Any], first: Mapping[str, Any], row: Mapping[str, Any]
) -> dict[str, Any]:
    gaps = np.abs(np.array(row["below"]) - np.array(first["below"]))
    deviation = base["deviation"]
    return {
        "stage": base["stage"],
        "direction": base["direction"],
        "measure": name,
        "step": row["step"],
        "num": row["num"],
        "mean": row["mean"],
        "shift": (row["mean"] - base["mean"]) / deviation if deviation else None,
        "distance": float(gaps.max()),
    }


def _known(scores: Scores, name: str) -> None:
    if name not in scores.columns:
        close = nearest_column(name, scores.columns)
        hint = f"did you mean {close!r}?" if close else f"measures are {', '.join(scores.measures)}"
        raise ConfigError(f"{scores.store.url}: no column {name!r}; {hint}")
