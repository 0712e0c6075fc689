"""What samples look like, whatever a reward says of them: the first thing that reward hacking changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unirl.rewards.picture_statistics import LUMA, brightness, edges, entropy

__all__ = ["PICTURE_COLUMNS", "picture_columns", "sample_metrics"]

PICTURE_COLUMNS = ("picture_brightness", "picture_dark_fraction", "picture_entropy", "picture_edges")
_DARK = 64
"""Luma under which a pixel is dark, of 255."""


def picture_columns(picture: np.ndarray) -> dict[str, float]:
    """Statistics of one picture, uint8 (H, W, 3): all in [0, 1], but the entropy in bits."""
    dark = float(((picture @ LUMA) < _DARK).mean())
    return dict(zip(PICTURE_COLUMNS, (brightness(picture), dark, entropy(picture), edges(picture))))


def sample_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Statistics over the experience rows of one step or one evaluation.

    Two samples are the same if they have the same words or, where the policy drew, the same picture.
    """
    drew = rows[0]["direction"] == "image"
    made = [row["blob"] if drew else row["response"] for row in rows]
    groups: dict[str, list[Any]] = {}
    for row, sample in zip(rows, made):
        groups.setdefault(row["prompt_key"], []).append(sample)
    metrics = {
        "samples/distinct_fraction": len(set(made)) / len(made),
        "samples/commonest_fraction": Counter(made).most_common(1)[0][1] / len(made),
    }
    if (large := [group for group in groups.values() if len(group) > 1]) != []:
        metrics["samples/equal_groups_fraction"] = float(np.mean([len(set(g)) == 1 for g in large]))
    if drew:
        for name in PICTURE_COLUMNS:
            values = np.array([row[name] for row in rows])
            short = f"samples/{name.removeprefix('picture_')}"
            metrics |= {short: float(values.mean()), f"{short}_std": float(values.std())}
    return metrics
