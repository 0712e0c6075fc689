from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.explore import Scores, calibration, calibration_error, compared, drift


@pytest.fixture
def by_hand(tmp_path: Path) -> Scores:
    """Step 1 holds 0, 1, ..., 99; step 2 the same moved by 50; step 3 what step 1 has."""
    store = FeatureStore.create(tmp_path / "experience")
    with store.writer(message="by hand") as writer:
        for step, moved in ((1, 0.0), (2, 50.0), (3, 0.0)):
            for number in range(100):
                writer.add(
                    f"{step}/{number:03d}",
                    kind="train",
                    stage="image",
                    step=step,
                    direction="image",
                    prompt_key="p",
                    reward=number + moved if number else math.nan,
                )
    return Scores.open(tmp_path)


def test_drift_is_what_was_worked_by_hand(by_hand: Scores) -> None:
    first, moved, same = drift(by_hand).to_pylist()
    assert (first["step"], first["num"], first["shift"], first["distance"]) == (1, 99, 0.0, 0.0)
    assert moved["shift"] == pytest.approx(50 / np.arange(1, 100).std(ddof=1))
    # Of 1..99 up to 50 are at most 50; of 51..149 none is.
    assert moved["distance"] == pytest.approx(50 / 99)
    assert (same["shift"], same["distance"]) == (0.0, 0.0)


def test_a_measure_that_was_constant_can_drift_both_ways(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "experience")
    with store.writer(message="constant") as writer:
        for step, value in ((1, 0.5), (2, 0.1), (3, 0.9)):
            place = {"stage": "text", "direction": "text", "prompt_key": "p"}
            writer.add(f"{step}", kind="train", step=step, reward=value, **place)
    rows = drift(Scores.open(tmp_path)).to_pylist()
    assert [row["distance"] for row in rows] == [0.0, 1.0, 1.0]
    assert [row["shift"] for row in rows] == [None, None, None]


def test_drift_begins_anew_in_each_stage(scores: Scores) -> None:
    rows = drift(scores, measures=["reward/vlm"]).to_pylist()
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["step"] for row in rows if row["distance"] == 0.0 and row["shift"] == 0.0] == [1, 5]
    with pytest.raises(ConfigError, match="did you mean 'reward/vlm'"):
        drift(scores, measures=["reward/vml"])


def test_calibration_counts_every_judged_sample_once(scores: Scores) -> None:
    table = calibration(scores, "reward/vlm", bins=4)
    judged = scores.where("isfinite(reward/vlm) and isfinite(judge)").to_arrow(["reward/vlm", "judge"])
    values, judge = judged["reward/vlm"].to_numpy(), judged["judge"].to_numpy()
    assert sum(table["num"].to_pylist()) == len(values)
    order = np.argsort(values, kind="stable")[: table["num"][0].as_py()]
    assert table["mean"][0].as_py() == pytest.approx(values[order].mean())
    assert table["accepted"][0].as_py() == pytest.approx(judge[order].mean())
    assert table["mean"].to_pylist() == sorted(table["mean"].to_pylist())
    for row in table.to_pylist():
        assert 0 <= row["low"] <= row["accepted"] <= row["high"] <= 1
    gaps = [row["num"] * abs(row["mean"] - row["accepted"]) for row in table.to_pylist()]
    assert calibration_error(table) == pytest.approx(sum(gaps) / len(values))


def test_equal_values_share_a_bin_and_nothing_judged_is_empty(scores: Scores, by_hand: Scores) -> None:
    table = calibration(scores, "judge", bins=10)
    assert (table["mean"].to_pylist(), table["accepted"].to_pylist()) == ([0.0, 1.0], [0.0, 1.0])
    nothing = calibration(scores.where("kind = 'train'"))
    assert nothing.num_rows == 0 and math.isnan(calibration_error(nothing))
    with pytest.raises(ConfigError, match="no judge"):
        calibration(by_hand)


def test_two_runs_are_compared_at_their_last_steps(scores: Scores) -> None:
    table = compared({"half": scores.where("step <= 4"), "whole": scores}).to_pylist()
    found = [row for row in table if row["stage"] == "image" and row["measure"] == "judge"]
    assert {row["run"] for row in found} == {"whole"} and {row["step"] for row in found} == {8}
    start = [row for row in table if (row["stage"], row["direction"]) == ("start", "text")]
    assert [row["run"] for row in start[:2]] == ["half", "whole"]
    assert start[0]["mean"] == start[1]["mean"]
    with pytest.raises(ConfigError, match="no sample of kind 'test' in a"):
        compared({"a": scores}, kind="test")
