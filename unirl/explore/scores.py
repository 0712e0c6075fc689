"""Look at what the rewards and the judge said about every sample of a run.

Everything is SQL over the index of the run's experience store; rows become Python objects only where a
caller asks for a few of them, so a run with a million samples opens as quickly as a small one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from PIL import Image

from storage import FeatureStore, StorageError
from unirl.errors import ConfigError
from unirl.explore.condition import nearest_column, quote_columns, quote_name, quote_text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Scores"]

_SHOWN = ("key", "kind", "stage", "direction", "step", "prompt_key", "prompt", "target", "response", "sample")
"""Columns that say what a sample is, in the order in which tables show them."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scored samples of one run, or those of them that fulfil some conditions.

    >>> scores = Scores.open("runs/demo")                                        # doctest: +SKIP
    >>> scores.where("reward/vlm < 0.2 and stage = 'image'").worst(8)            # doctest: +SKIP
    """

    store: FeatureStore
    conditions: tuple[str, ...] = ()
    """SQL conditions, all of which hold; column names are quoted already."""
    added: tuple[pa.Table, ...] = field(default=(), compare=False)
    """Columns that are not in the store, each table with the `row` that its numbers belong to."""

    @classmethod
    def open(cls, run_or_store: str | Path | FeatureStore) -> Scores:
        """Open the experience of a run directory, or an experience store itself.

        Args:
            run_or_store: `runs/NAME`, `runs/NAME/experience`, or an open store. A path opens the newest
                snapshot and stays on it; open it again to see the rows of a run that goes on.

        Raises:
            ConfigError: If the path holds no experience, or the store is not one of experience.
        """
        store = run_or_store if isinstance(run_or_store, FeatureStore) else _open_store(Path(run_or_store))
        missing = {"kind", "stage", "step", "prompt_key", "reward"} - set(store.columns)
        if missing:
            raise ConfigError(
                f"{store.url}: not a store of experience, it has no columns {', '.join(sorted(missing))}; "
                "give a run directory, or the folder `experience` inside one"
            )
        return cls(store)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that a condition may name."""
        found = (name for table in self.added for name in table.column_names if name != "row")
        return (*self.store.columns, *found)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the reward components, with their prefix: `reward/vlm`."""
        return tuple(name for name in self.columns if name.startswith("reward/"))

    @property
    def measures(self) -> tuple[str, ...]:
        """What there is a number of for a sample: `reward`, its components, and `judge` if there was one."""
        return ("reward", *self.components, *(name for name in self.columns if name == "judge"))

    @property
    def sample_columns(self) -> str:
        """SQL list of the columns that say what a sample is and how it was scored."""
        present = set(self.columns)
        return ", ".join(quote_name(name) for name in (*_SHOWN, *self.measures) if name in present)

    def where(self, condition: str) -> Scores:
        """Keep the samples that fulfil an SQL condition; calls add up.

        Args:
            condition: For example `reward/vlm < 0.2 and stage = 'image'`. Names with a slash need no quotes.
                NaN is larger than every number in SQL here: `isnan(reward/vlm)` finds unscored samples.

        Raises:
            ConfigError: If the condition is not valid SQL or names an unknown column.
        """
        if not condition.strip():
            raise ConfigError("the condition is empty; write one such as \"stage = 'image'\"")
        kept = (*self.conditions, quote_columns(condition, self.columns))
        narrowed = replace(self, conditions=kept)
        try:
            narrowed.query("SELECT key FROM samples LIMIT 0")
        except StorageError as error:
            close = nearest_column(condition, self.columns)
            hint = f"did you mean {close!r}?" if close else f"columns are {', '.join(self.columns)}"
            raise ConfigError(f"condition {condition!r}: {str(error).splitlines()[0]}; {hint}") from error
        return narrowed

    def query(self, sql: str) -> pa.Table:
        """Answer an SQL query in which `samples` stands for the samples kept so far.

        Names with a slash need no quotes: `SELECT step, avg(reward/vlm) FROM samples GROUP BY step`.
        """
        quoted = quote_columns(sql, self.columns)
        if not self.conditions and not self.added:
            return self.store.query(quoted)
        tables = {f"added_{number}": table for number, table in enumerate(self.added)}
        joined = " ".join(["samples", *(f'LEFT JOIN {name} USING ("row")' for name in tables)])
        # The line break ends a comment that a condition may close with.
        kept = " AND ".join(f"({condition}\n)" for condition in self.conditions) or "true"
        head = f"WITH samples AS (SELECT * FROM (SELECT * FROM {joined}) WHERE {kept})"
        opening = re.match(r"\s*WITH\s+", quoted, re.IGNORECASE)
        sql = f"{head}, {quoted[opening.end() :]}" if opening else f"{head} {quoted}"
        return self.store.query(sql, tables=tables)

    def __len__(self) -> int:
        return int(self.query("SELECT count(*) AS n FROM samples")["n"][0].as_py())

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the samples as a table, in order of step and key; all columns unless some are named."""
        listed = "*" if columns is None else ", ".join(quote_name(name) for name in columns)
        return self.query(f"SELECT {listed} FROM samples ORDER BY step, key")

    def to_pandas(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return `to_arrow(columns)` as a pandas frame.

        Raises:
            ConfigError: If pandas is not installed; the extra `notebook` brings it.
        """
        try:
            import pandas  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "to_pandas needs pandas, which is not installed; "
                "install it with `pip install 'unirl[notebook]'`, or use to_arrow"
            ) from error
        return self.to_arrow(columns).to_pandas()

    def summary(self, by: Sequence[str] = ("kind", "stage", "step")) -> pa.Table:
        """Describe each measure in each group of samples.

        Args:
            by: Columns to group by; `("stage",)` gives one row per stage and measure, `()` one per measure.

        Returns:
            One row per group and measure: the columns of `by`, `measure`, `num` (samples scored),
            `num_unscored` (NaN), `mean`, `deviation`, `minimum`, `p10`, `median`, `p90`, `maximum`. A measure
            that no sample of the group has is null in the statistics.
        """
        groups = _Groups(by)
        parts = [
            f"""SELECT {groups.listed} {quote_text(name)} AS measure, {position} AS place,
                min(step) AS start, count(x) AS num, count(*) - count(x) AS num_unscored, avg(x) AS mean,
                stddev_samp(x) AS deviation, min(x) AS minimum, quantile_cont(x, 0.1) AS p10,
                quantile_cont(x, 0.5) AS median, quantile_cont(x, 0.9) AS p90, max(x) AS maximum
                FROM (SELECT *, {_finite(name)} AS x FROM samples) {groups.grouped}"""
            for position, name in enumerate(self.measures)
        ]
        return self.query(
            f"SELECT * EXCLUDE (place, start) FROM ({' UNION ALL '.join(parts)}) "
            f"ORDER BY {groups.ordered}, place"
        )

    def agreement(self, by: Sequence[str] = ("stage",)) -> pa.Table:
        """Say how well the reward, its components and the judge agree, pair by pair.

        Returns:
            One row per group and pair: the columns of `by`, `first`, `second`, `num` (samples that have
            both), `correlation` (Pearson's), `auc`. The last is the chance that `first` ranks a sample that
            the judge accepts above one that it rejects, ties counting half: 0.5 is no better than chance;
            it is null unless `second` is the judge. Undefined values, as for a constant, are null.

        Source: the area under the ROC curve as the Mann-Whitney statistic, from average ranks.
        """
        groups = _Groups(by)
        names = self.measures
        pairs = [(first, second) for i, first in enumerate(names) for second in names[i + 1 :]]
        if not pairs:
            return self.query(
                f"SELECT {groups.listed} '' AS first, '' AS second, 0 AS num, 0.0 AS correlation, 0.0 AS auc "
                "FROM samples LIMIT 0"
            )
        parts = [_pair_sql(first, second, groups, place) for place, (first, second) in enumerate(pairs)]
        return self.query(
            f"SELECT * EXCLUDE (place, start) FROM ({' UNION ALL '.join(parts)}) "
            f"ORDER BY {groups.ordered}, place"
        )

    def best(self, n: int = 8, by: str = "reward") -> pa.Table:
        """Return the `n` samples with the largest `by`; unscored ones are left out, ties go by key."""
        return self._extreme(n, by, "DESC")

    def worst(self, n: int = 8, by: str = "reward") -> pa.Table:
        """Return the `n` samples with the smallest `by`; unscored ones are left out, ties go by key."""
        return self._extreme(n, by, "ASC")

    def history(self, prompt_key: str) -> pa.Table:
        """Return every sample of one prompt, first step first.

        Raises:
            ConfigError: If no sample has this prompt.
        """
        found = self.query(
            f"SELECT {self.sample_columns} FROM samples WHERE prompt_key = {quote_text(prompt_key)} "
            "ORDER BY step, key"
        )
        if found.num_rows == 0:
            some = self.query("SELECT DISTINCT prompt_key FROM samples ORDER BY prompt_key LIMIT 5")
            names = ", ".join(map(str, some["prompt_key"].to_pylist())) or "none, there are no samples"
            raise ConfigError(
                f"{self.store.url}: no sample of prompt {prompt_key!r}; the first prompts are {names}"
            )
        return found

    def picture(self, key: str) -> Image.Image:
        """Return the picture that was judged for the sample `key`, as RGB.

        Raises:
            KeyNotFoundError: If there is no such sample.
            StorageError: If the sample was stored without a picture, or its bytes are damaged.
            ConfigError: If the picture cannot be decoded.
        """
        data = io.BytesIO(self.store.blob(self.store.row(key)))
        try:
            with Image.open(data) as image:
                return image.convert("RGB")
        except OSError as error:
            place = f"{self.store.url}: sample {key!r}"
            raise ConfigError(f"{place} was stored with a picture that cannot be decoded: {error}") from error

    def _extreme(self, n: int, by: str, direction: str) -> pa.Table:
        if by not in self.columns:
            close = nearest_column(by, self.columns)
            hint = f"did you mean {close!r}?" if close else f"measures are {', '.join(self.measures)}"
            raise ConfigError(f"{self.store.url}: no column {by!r}; {hint}")
        return self.query(
            f"SELECT {self.sample_columns} FROM samples WHERE {_finite(by)} IS NOT NULL "
            f"ORDER BY {quote_name(by)} {direction}, key LIMIT {int(n)}"
        )


def _open_store(path: Path) -> FeatureStore:
    for candidate in (path / "experience", path):
        if (candidate / "snapshots").is_dir():
            return FeatureStore.open(candidate)
    if not path.exists():
        beside = sorted(entry.name for entry in path.parent.glob("*/") if entry.is_dir())[:8]
        found = f"{path.parent} holds {', '.join(beside)}" if beside else f"{path.parent} holds no folder"
        raise ConfigError(f"{path}: no such run; {found}")
    raise ConfigError(
        f"{path}: no experience in it; the folder `experience` appears with the first step of a run"
    )


class _Groups:
    """Pieces of SQL for groups by some columns; without any, all samples are one group."""

    def __init__(self, by: Sequence[str]) -> None:
        names = [quote_name(name) for name in by]
        joined = ", ".join(names)
        self.listed = f"{joined}, " if names else ""
        self.grouped = f"GROUP BY {joined}" if names else ""
        self.partition = f"PARTITION BY {joined}" if names else ""
        self.ordered = ", ".join([f"min(start) OVER ({self.partition})", *names])
        """The groups in the order in which they began."""


def _finite(name: str) -> str:
    """SQL for the column as a double, null where it is NaN or infinite."""
    value = f"CAST({quote_name(name)} AS DOUBLE)"
    return f"CASE WHEN isfinite({value}) THEN {value} END"


def _pair_sql(first: str, second: str, groups: _Groups, place: int) -> str:
    accepted = "b >= 0.5" if second == "judge" else "NULL"
    return f"""
        SELECT {groups.listed} {quote_text(first)} AS first, {quote_text(second)} AS second, {place} AS place,
            min(step) AS start, count(*) AS num,
            CASE WHEN isfinite(corr(a, b)) THEN corr(a, b) END AS correlation,
            (sum(mean_rank) FILTER (accepted) - count_if(accepted) * (count_if(accepted) + 1) / 2)
                / nullif(count_if(accepted) * count_if(NOT accepted), 0) AS auc
        FROM (
            SELECT *, {accepted} AS accepted,
                rank() OVER ({groups.partition} ORDER BY a)
                    + (count(*) OVER (PARTITION BY {groups.listed} a) - 1) / 2 AS mean_rank
            FROM (SELECT {groups.listed} step, {_finite(first)} AS a, {_finite(second)} AS b FROM samples)
            WHERE a IS NOT NULL AND b IS NOT NULL
        )
        {groups.grouped}"""
