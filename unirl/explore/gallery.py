"""Pictures of samples: sheets for a notebook, thumbnails for the report, and the choice of what to show."""

from __future__ import annotations

import base64
import io
import math
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from PIL import Image

from storage import FeatureStore, StorageError
from unirl.errors import ConfigError
from unirl.explore.condition import quote_text
from unirl.explore.plots import GRID, INK
from unirl.explore.scores import Scores

__all__ = ["Card", "cards", "contact_sheet", "samples_over_time"]

_THUMBNAIL = 192
"""Longest side of an embedded picture, in pixels; smaller pictures keep their own pixels."""
_FRAMES = "frames"
"""Column of the data store that holds the frames of a clip, uint8 (F, H, W, 3)."""
_NUM_FRAMES = 4
"""Most frames of a strip, the first and the last of the clip among them."""
_FRAME_GAP = 1
"""Pixels between two frames of a strip."""
_VERDICTS = {1.0: ("#1e7f57", " · judge: yes"), 0.0: ("#b8323f", " · judge: no")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One sample as a page shows it."""

    key: str
    kind: str
    stage: str
    step: int
    prompt: str
    """Key of the prompt."""
    direction: str
    asked: str
    """What the policy was given in words: the prompt to draw, or "" where the picture is the prompt."""
    wrote: str
    """What the policy wrote; "" where it drew."""
    target: str
    reward: float
    components: tuple[tuple[str, float], ...]
    judge: float
    """1 accepted, 0 rejected, NaN not judged."""
    picture: str
    """Data URI, or "" where the picture cannot be read. A clip is a strip of frames."""


def samples_over_time(scores: Scores, *, kind: str, num_steps: int = 6, per_step: int = 6) -> pa.Table:
    """Choose samples that show how a run went: steps evenly spaced, the same prompts where possible.

    Args:
        scores: The samples to choose from.
        kind: "train" or "eval".
        num_steps: Most steps to show of each stage and direction; the first and the last are among them.
        per_step: Most samples to show of one step, each of another prompt. Prompts that come at many steps
            go first, so that evaluation prompts can be followed.
    """
    return scores.query(f"""
        WITH chosen AS (
            SELECT key, stage, direction, step, prompt_key, sample FROM samples
            WHERE kind = {quote_text(kind)}),
        steps AS (
            SELECT stage, direction, step, row_number() OVER w - 1 AS place,
                count(*) OVER (PARTITION BY stage, direction) - 1 AS last
            FROM (SELECT DISTINCT stage, direction, step FROM chosen)
            WINDOW w AS (PARTITION BY stage, direction ORDER BY step)),
        slots AS (SELECT *, round(place * {num_steps - 1} / greatest(last, 1)) AS slot FROM steps),
        kept AS (
            SELECT stage, direction, step FROM slots
            QUALIFY row_number() OVER (
                PARTITION BY stage, direction, slot
                ORDER BY abs(place * {num_steps - 1} - slot * last), step) = 1),
        often AS (SELECT direction, prompt_key, count(DISTINCT step) AS seen FROM chosen GROUP BY ALL),
        ones AS (
            SELECT key, stage, direction, step, prompt_key, seen
            FROM chosen JOIN kept USING (stage, direction, step) JOIN often USING (direction, prompt_key)
            QUALIFY row_number() OVER (
                PARTITION BY stage, direction, step, prompt_key ORDER BY sample, key) = 1),
        picked AS (
            SELECT key FROM ones
            QUALIFY row_number() OVER (
                PARTITION BY stage, direction, step ORDER BY seen DESC, prompt_key) <= {per_step})
        SELECT {scores.sample_columns} FROM samples WHERE key IN (SELECT key FROM picked)
        ORDER BY step, stage, direction, prompt_key""")


def cards(scores: Scores, table: pa.Table, *, data: FeatureStore | None = None) -> list[Card]:
    """Turn rows of a table, as `Scores.best` or `samples_over_time` return them, into cards with pictures.

    Args:
        scores: Where the pictures are.
        table: Rows of samples.
        data: Store that the prompts came from. Where it has frames of clips, what was written about a clip
            stands below a strip of them, instead of below the last.
    """
    clips = data if data is not None and _FRAMES in data.tensor_columns else None
    made = []
    for row in table.to_pylist():
        drew = row["direction"] == "image"
        made.append(
            Card(
                key=row["key"],
                kind=row["kind"],
                stage=row["stage"],
                step=int(row["step"]),
                prompt=str(row.get("prompt_key") or ""),
                direction=row["direction"],
                asked=str(row.get("prompt") or row.get("target") or "") if drew else "",
                wrote="" if drew else str(row.get("response") or ""),
                target=str(row.get("target") or ""),
                reward=_float(row.get("reward")),
                components=tuple(
                    (name.removeprefix("reward/"), _float(row.get(name))) for name in scores.components
                ),
                judge=_float(row.get("judge")),
                picture=_data_uri(
                    (None if drew or clips is None else _strip(clips, str(row.get("prompt_key") or "")))
                    or _picture(scores, row["key"])
                ),
            )
        )
    return made


def contact_sheet(scores: Scores, table: pa.Table, *, columns: int = 4) -> Figure:
    """Draw the samples of a table side by side, each with its words, its scores and the judge's verdict.

    Args:
        scores: Where the pictures are.
        table: Rows with the columns that `Scores.best`, `worst` and `history` return.
        columns: Pictures in one row.

    Raises:
        ConfigError: If `columns` is under 1.
    """
    if columns < 1:
        raise ConfigError(f"contact sheet: columns is {columns}, wanted 1 or more")
    rows = table.to_pylist()
    pictures = [_picture(scores, row["key"]) for row in rows]
    tallest = max((picture.height / picture.width for picture in pictures if picture), default=1.0)
    num_lines = max(1, math.ceil(len(rows) / columns))
    # Inches: a picture is 2.3 wide, three lines of words are 0.6 high.
    figure = Figure(figsize=(2.4 * columns, (2.3 * tallest + 0.6) * num_lines), layout="constrained")
    grid = figure.subplots(num_lines, columns, squeeze=False).ravel()
    for axes in grid[len(rows) :]:
        axes.set_axis_off()
    for axes, row, picture in zip(grid, rows, pictures):
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=_VERDICTS.get(_float(row.get("judge")), (GRID, ""))[0], linewidth=1.5)
        if picture:
            axes.imshow(np.asarray(picture), interpolation="nearest")
        else:
            axes.text(0.5, 0.5, "no picture", transform=axes.transAxes, ha="center", color=INK, fontsize=8)
        axes.set_title(_words(row), fontsize=8, color=INK, loc="left", parse_math=False)
    return figure


def _picture(scores: Scores, key: str) -> Image.Image | None:
    """The picture of a sample, or None where it is missing or damaged."""
    try:
        return scores.picture(key)
    except (ConfigError, StorageError):
        return None


def _strip(data: FeatureStore, prompt: str) -> Image.Image | None:
    """Frames of a prompt's clip from left to right, or None where they are missing or damaged."""
    try:
        frames = data.tensor(_FRAMES).row(data.row(prompt))
    except StorageError:
        return None
    frames = frames[np.linspace(0, len(frames) - 1, min(len(frames), _NUM_FRAMES)).round().astype(int)]
    gap = ((0, 0), (0, 0), (0, _FRAME_GAP), (0, 0))
    spaced = np.concatenate(np.pad(frames, gap, constant_values=255), axis=1)
    return Image.fromarray(spaced[:, :-_FRAME_GAP])


def _words(row: dict[str, Any]) -> str:
    if row["direction"] == "image":
        lines = [f"asked: {row.get('prompt') or ''}"]
    else:
        lines = [f"wrote: {row.get('response') or ''}", f"true: {row.get('target') or ''}"]
    verdict = _VERDICTS.get(_float(row.get("judge")), (GRID, ""))[1]
    lines.append(f"step {row['step']} · reward {_float(row.get('reward')):.3g}{verdict}")
    return "\n".join(textwrap.shorten(line, 38, placeholder="…") for line in lines)


def _data_uri(picture: Image.Image | None) -> str:
    if picture is None:
        return ""
    buffer = io.BytesIO()
    if max(picture.size) <= _THUMBNAIL:
        picture.save(buffer, format="PNG", optimize=True)
        kind = "png"
    else:
        picture.thumbnail((_THUMBNAIL, _THUMBNAIL), Image.Resampling.LANCZOS)
        picture.save(buffer, format="JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
