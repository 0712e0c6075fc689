from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unirl.trainer.metrics import MetricsLog

LABELS = {"stage": "text", "kind": "train", "stage_step": 1}


def write(run: Path, steps: range, *, last_step: int, value: float = 0.5) -> None:
    log = MetricsLog(run, last_step=last_step)
    for step in steps:
        log.write(step, LABELS, {"reward/mean": value + step})
    log.close()


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_one_plain_json_object_a_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, last_step=-1)
    log.write(1, LABELS, {"reward/mean": 0.25, "value/loss": math.nan, "policy/ratio_max": math.inf})
    log.close()
    (line,) = lines(tmp_path)
    assert line == {
        "step": 1, "stage": "text", "kind": "train", "stage_step": 1,
        "reward/mean": 0.25, "value/loss": None, "policy/ratio_max": None,
    }  # fmt: skip
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, last_step=-1)
    log.write(1, LABELS, {"reward/mean": 0.25})
    assert len(lines(tmp_path)) == 1
    log.close()


def test_a_resume_drops_the_lines_of_later_steps(tmp_path: Path) -> None:
    write(tmp_path, range(5), last_step=-1)
    write(tmp_path, range(3, 5), last_step=2, value=10.0)
    assert [(line["step"], line["reward/mean"]) for line in lines(tmp_path)] == [
        (0, 0.5), (1, 1.5), (2, 2.5), (3, 13.0), (4, 14.0),
    ]  # fmt: skip


def test_a_resume_keeps_all_lines_of_its_step(tmp_path: Path) -> None:
    """A step may have a line of training and one for each evaluation."""
    log = MetricsLog(tmp_path, last_step=-1)
    for kind in ("train", "eval", "eval"):
        log.write(2, LABELS | {"kind": kind}, {})
    log.close()
    write(tmp_path, range(0), last_step=2)
    assert [line["kind"] for line in lines(tmp_path)] == ["train", "eval", "eval"]


def test_a_run_that_starts_again_drops_everything(tmp_path: Path) -> None:
    write(tmp_path, range(3), last_step=-1)
    write(tmp_path, range(0), last_step=-1)
    assert lines(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 9, 40])
def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path, cut: int) -> None:
    write(tmp_path, range(3), last_step=-1)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-cut])
    write(tmp_path, range(2, 4), last_step=2, value=10.0)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]
    assert lines(tmp_path)[2]["reward/mean"] == 12.0


def test_a_leftover_of_a_killed_truncation_does_no_harm(tmp_path: Path) -> None:
    write(tmp_path, range(3), last_step=-1)
    (tmp_path / "metrics.partial").write_text("half a li")
    write(tmp_path, range(0), last_step=5)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]


def test_tensorboard_shows_the_same_numbers(tmp_path: Path) -> None:
    write(tmp_path, range(4), last_step=-1)
    write(tmp_path, range(2, 5), last_step=1, value=10.0)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    found = [(event.step, event.value) for event in board.Scalars("text/reward/mean")]
    assert found == [(line["step"], line["reward/mean"]) for line in lines(tmp_path)]


@pytest.mark.parametrize("damage", ["gone", "\x00\x00\x00\n"])
def test_lines_that_a_power_cut_took_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    write(tmp_path, range(3), last_step=-1)
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]
    (tmp_path / "metrics.jsonl").write_text("".join([*kept, *([] if damage == "gone" else [damage])]))
    log = MetricsLog(tmp_path, last_step=2, num_lines=3)
    assert log.num_lines == 2 and "had 3 lines when the state was saved, and 2 of these" in caplog.text
    log.write(3, LABELS, {"reward/mean": 1.0})
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 3]
