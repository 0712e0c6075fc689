from __future__ import annotations

import numpy as np

from unirl.explore.seed_band import seed_band


def test_runs_are_joined_step_by_step() -> None:
    first = (np.array([1.0, 2.0, 3.0]), np.array([0.0, 4.0, np.nan]))
    second = (np.array([2.0, 3.0, 4.0]), np.array([2.0, np.nan, 5.0]))
    band = seed_band([first, second])
    np.testing.assert_array_equal(band.steps, [1, 2, 3, 4])
    np.testing.assert_array_equal(band.low, [0, 2, np.nan, 5])
    np.testing.assert_array_equal(band.mean, [0, 3, np.nan, 5])
    np.testing.assert_array_equal(band.high, [0, 4, np.nan, 5])


def test_one_run_is_its_own_band() -> None:
    band = seed_band([(np.array([1.0, 2.0]), np.array([3.0, 1.0]))])
    for line in (band.low, band.mean, band.high):
        np.testing.assert_array_equal(line, [3, 1])


def test_no_steps_give_an_empty_band() -> None:
    assert len(seed_band([(np.zeros(0), np.zeros(0))]).mean) == 0
    assert len(seed_band([]).mean) == 0
