"""The ingest report as one self-contained HTML page: counts, histograms, thumbnails, quarantine."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import jinja2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datapipe.decode import decode_image
from datapipe.decode.video import video_thumbnail
from datapipe.errors import DecodeError, MissingExtraError
from datapipe.report import IngestReport
from datapipe.report_template import PAGE
from storage import FeatureStore

__all__ = ["write_report_page"]

_NUM_THUMBNAILS: Final = 24
_THUMBNAIL_PIXELS: Final = 112
_NUM_BINS: Final = 24


def write_report_page(store: FeatureStore, report: IngestReport, path: Path) -> None:
    """Write the page. Histograms and thumbnails are those of the whole store, not of the last run alone.

    Args:
        store: Opened on the snapshot of the report.
        report: The run.
        path: File to write; its folder is made.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(PAGE).render(
        report=report,
        num_rows=len(store),
        histograms=_histograms(store),
        thumbnails=_thumbnails(store),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _histograms(store: FeatureStore) -> list[dict[str, object]]:
    columns = (
        ("width", "Width in pixels", "width", True),
        ("height", "Height in pixels", "height", True),
        ("width", "Aspect ratio, width / height", "width / height", True),
        ("caption", "Caption length in characters", "length(caption)", False),
        ("bytes", "File size in bytes", "bytes", True),
        ("duration_s", "Duration of videos in seconds", "duration_s", True),
    )
    found: list[dict[str, object]] = []
    for column, title, expression, is_log in columns:
        if store.columns.get(column) not in (("VARCHAR",) if column == "caption" else ("BIGINT", "DOUBLE")):
            continue
        sql = f"SELECT ({expression})::DOUBLE AS x FROM samples WHERE {expression} IS NOT NULL"
        values = store.query(sql).column("x").to_numpy()
        if len(values):
            found.append({"title": title, **_bars(values, is_log=is_log)})
    return found


def _bars(values: NDArray[np.float64], *, is_log: bool) -> dict[str, object]:
    """Bars of a histogram, in a drawing 240 wide and 60 high; sizes are binned by their logarithm."""
    is_log = is_log and values.min() > 0
    scaled = np.log(values) if is_log else values
    low, high = float(scaled.min()), float(scaled.max())
    counts, _ = np.histogram(
        scaled, bins=_NUM_BINS, range=(low, high) if high > low else (low - 0.5, low + 0.5)
    )
    step = 240 / _NUM_BINS
    bars = [
        {"x": round(index * step, 1), "height": round(60 * count / counts.max(), 1), "count": int(count)}
        for index, count in enumerate(counts.tolist())
    ]
    low, middle, high = np.quantile(values, [0, 0.5, 1]).tolist()
    return {"bars": bars, "width": round(step - 1, 1), "low": low, "median": middle, "high": high}


def _thumbnails(store: FeatureStore) -> list[dict[str, str]]:
    """Evenly picked pictures and videos; one that cannot be decoded after all is left out."""
    if "width" not in store.columns:
        return []
    rows: Sequence[int] = store.select("bytes > 0").rows.tolist()
    picked = rows[:: max(1, len(rows) // _NUM_THUMBNAILS)][:_NUM_THUMBNAILS]
    view = store.select(f"row IN ({', '.join(map(str, picked))})") if picked else store.select()[:0]
    found: list[dict[str, str]] = []
    for row, key, caption, modality in zip(
        view.rows.tolist(),
        view.keys(),
        view.column("caption").to_pylist(),
        view.column("modality").to_pylist(),
    ):
        try:
            image = _data_uri(store.blob(row), is_video=(modality or "").startswith("video"))
        except (DecodeError, MissingExtraError):
            continue  # a row that was taken on trust, or a machine that cannot read videos
        found.append({"key": key, "caption": caption or "", "image": image})
    return found


def _data_uri(blob: memoryview, *, is_video: bool) -> str:
    pixels = video_thumbnail(bytes(blob), max_side=_THUMBNAIL_PIXELS) if is_video else decode_image(blob)
    image = Image.fromarray(pixels)
    image.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
