"""Explore what a run did: its scores, its pictures, and one page about all of it."""

from __future__ import annotations

from unirl.explore.gallery import contact_sheet, samples_over_time
from unirl.explore.plots import (
    component_histogram,
    component_over_steps,
    learning_curve,
    memory_use,
    metric_curves,
    phase_times,
    reward_and_judge,
)
from unirl.explore.report import write_report
from unirl.explore.run import Run, open_run
from unirl.explore.scores import Scores

__all__ = [
    "Run",
    "Scores",
    "component_histogram",
    "component_over_steps",
    "contact_sheet",
    "learning_curve",
    "memory_use",
    "metric_curves",
    "open_run",
    "phase_times",
    "reward_and_judge",
    "samples_over_time",
    "write_report",
]
