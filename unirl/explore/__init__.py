"""Explore what a run did: its scores, its pictures, its alarms, and one page about all of it."""

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
from unirl.explore.rescore import rescore
from unirl.explore.run import Run, open_run
from unirl.explore.run_alarms import run_alarms
from unirl.explore.score_plots import (
    agreement_matrix,
    agreement_over_steps,
    calibration_curve,
    drift_over_steps,
    prompt_history,
    runs_side_by_side,
)
from unirl.explore.scores import Scores
from unirl.explore.statistics import calibration, calibration_error, compared, drift

__all__ = [
    "Run",
    "Scores",
    "agreement_matrix",
    "agreement_over_steps",
    "calibration",
    "calibration_curve",
    "calibration_error",
    "compared",
    "component_histogram",
    "component_over_steps",
    "contact_sheet",
    "drift",
    "drift_over_steps",
    "learning_curve",
    "memory_use",
    "metric_curves",
    "open_run",
    "phase_times",
    "prompt_history",
    "rescore",
    "reward_and_judge",
    "run_alarms",
    "runs_side_by_side",
    "samples_over_time",
    "write_report",
]
