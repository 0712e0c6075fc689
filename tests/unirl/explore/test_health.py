from __future__ import annotations

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
    assert health.refusals[0].examples == ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "4.jpg"]
    assert (health.num_rows, health.num_refused) == (6, 8)
    assert health.bad_fraction == pytest.approx(8 / 14)


def test_an_empty_store_is_healthy(tmp_path: Path) -> None:
    health = data_health(FeatureStore.create(tmp_path))
    assert (health.num_rows, health.bad_fraction, health.splits, health.refusals) == (0, 0.0, [], [])
