"""Score the samples of a run again, with another reward, and leave the run as it is."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from storage import FeatureStore, StorageError
from unirl.errors import ConfigError
from unirl.explore.condition import quote_text
from unirl.explore.scores import Scores

if TYPE_CHECKING:
    from unirl.types import Reward, Sample

__all__ = ["rescore"]

log = logging.getLogger("unirl.explore")


def rescore(
    run_or_scores: str | Path | FeatureStore | Scores,
    reward: Reward,
    *,
    name: str = "again",
    batch_size: int = 256,
) -> Scores:
    """Score the samples of a run with another reward, in one call.

    The samples of one step and prompt reach the reward in one call, so that an `Ensemble` that compares them
    can. Only one batch of pictures is held at a time. Experience keeps a sample's picture and its words; a
    reward that asks about a clip or about further pictures cannot score it again.

    Args:
        run_or_scores: The run, or those of its samples that are to be scored.
        reward: Any reward. As a `CachedReward` it scores nothing twice.
        name: The new column is `reward/<name>`.
        batch_size: Samples in one call; more only where a prompt has more samples.

    Returns:
        The same samples with the column `reward/<name>`, which every query, table and figure knows. It is NaN
        where the reward has no score, and where the sample's picture is missing or damaged. Nothing is
        written into the run.

    Raises:
        ConfigError: If the name is taken.
    """
    scores = run_or_scores if isinstance(run_or_scores, Scores) else Scores.open(run_or_scores)
    column = f"reward/{name}"
    if column in scores.columns:
        raise ConfigError(f"{scores.store.url}: it has a column {column!r} already; give another name")
    rows, totals, lost = [np.zeros(0, np.int64)], [np.zeros(0)], 0
    for batch in _batches(scores, batch_size):
        samples, readable = _samples(scores, batch)
        total = np.full(batch.num_rows, np.nan)
        if samples:
            total[readable] = reward.score(samples).total
        lost += batch.num_rows - len(samples)
        rows.append(batch["row"].to_numpy())
        totals.append(total)
    if lost:
        log.warning("%s: %d samples have no picture that can be read, and no score", column, lost)
    table = pa.table({"row": np.concatenate(rows), column: np.concatenate(totals)})
    return replace(scores, added=(*scores.added, table))


def _batches(scores: Scores, batch_size: int) -> Iterator[pa.Table]:
    """The samples step by step; within a step prompts stay whole."""
    steps = scores.query(
        "SELECT kind, stage, step, direction FROM samples GROUP BY ALL ORDER BY step, kind, stage, direction"
    )
    for step in steps.to_pylist():
        table = scores.query(
            'SELECT "row", key, prompt_key, direction, target, response FROM samples WHERE '
            + " AND ".join(
                f"{field} IS NOT DISTINCT FROM {quote_text(str(value))}" for field, value in step.items()
            )
            + ' ORDER BY prompt_key, "row"'
        )
        start = place = 0
        for _, group in itertools.groupby(table["prompt_key"].to_pylist()):
            size = sum(1 for _ in group)
            if place > start and place + size - start > batch_size:
                yield table.slice(start, place - start)
                start = place
            place += size
        yield table.slice(start)


def _samples(scores: Scores, batch: pa.Table) -> tuple[list[Sample], list[int]]:
    """The samples whose pictures can be read, and their places in the batch."""
    from unirl.types import Sample

    samples, readable = [], []
    for place, row in enumerate(batch.to_pylist()):
        try:
            picture = scores.picture(row["key"])
        except (ConfigError, StorageError):
            continue
        readable.append(place)
        target = str(row["target"] or "")
        samples.append(
            Sample(
                key=row["prompt_key"],
                direction=row["direction"],
                caption=str(row["response"] or "") if row["direction"] == "text" else target,
                image=np.asarray(picture),
                target=target,
            )
        )
    return samples, readable
