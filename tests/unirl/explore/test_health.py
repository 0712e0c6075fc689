from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage import FeatureStore
from unirl.explore.health import data_health


def test_rows_are_counted_by_split_and_refusals_by_reason(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path)
    with store.writer(message="ingest") as writer:
        for number in range(6):
            writer.add(f"k{number}", split="eval" if number == 0 else "sft")
        for number in range(7):
            writer.quarantine(key=f"t{number}", place=f"{number}.jpg", reason="truncated", data=b"x")
        writer.quarantine(key="z", place="z.png", reason="empty", data=b"")
    health = data_health(store.refresh())
    assert health.splits == [("sft", 5), ("eval", 1)]
    assert [(refusals.reason, refusals.num) for refusals in health.refusals] == [
        ("truncated", 7),
        ("empty", 1),
    ]
    assert health.remarks == []
    assert health.refusals[0].examples == ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "4.jpg"]
    assert (health.num_rows, health.num_refused) == (6, 8)
    assert health.bad_fraction == pytest.approx(8 / 14)


def test_details_do_not_split_a_reason_and_reports_of_later_snapshots_do_not_count(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path)
    with store.writer(message="ingest") as writer:
        writer.quarantine(key="a", place="a.jpg", reason="truncated: 12 of 40 bytes", data=b"x")
        writer.quarantine(key="b", place="b.jpg", reason="truncated: 7 of 9 bytes", data=b"x")
    (tmp_path / "reports").mkdir()
    for snapshot in (1, 2):
        report = {
            "snapshot": snapshot,
            "notes": {"orphan caption": 2},
            "num_reoriented": 5,
            "num_with_alpha": 0,
        }
        (tmp_path / "reports" / f"ingest-{snapshot:08d}.json").write_text(json.dumps(report))
    (tmp_path / "reports" / "ingest-00000000.json").write_text("{")
    health = data_health(store.refresh())
    assert [(refusals.reason, refusals.num) for refusals in health.refusals] == [("truncated", 2)]
    assert health.refusals[0].examples == ["a.jpg (12 of 40 bytes)", "b.jpg (7 of 9 bytes)"]
    assert health.remarks == [("turned upright", 5), ("orphan caption", 2)]


def test_an_empty_store_is_healthy(tmp_path: Path) -> None:
    health = data_health(FeatureStore.create(tmp_path))
    assert (health.num_rows, health.bad_fraction, health.splits, health.refusals) == (0, 0.0, [], [])
