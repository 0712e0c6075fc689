"""Counting, and what the report derives from the counts."""

from __future__ import annotations

import json
from pathlib import Path

from datapipe.report import BadFractionError, IngestReport
from datapipe.sources import Fault, Note
from datapipe.tally import Tally


def report(num_good: int, num_bad: int, budget: float = 0.0) -> IngestReport:
    tally = Tally(num_added=num_good)
    for index in range(num_bad):
        reason = "truncated" if index % 2 else "html"
        tally.add_fault(Fault(key=f"k{index}", place=f"p{index}", reason=reason, detail="d"), f"/s/p{index}")
    tally.add_note(Note(place="n", reason="ignored_file", detail="d"), "/s/n")
    return tally.freeze(
        sources=("/s",), store="store", snapshot=3, max_bad_fraction=budget, is_dry_run=False, wall_s=2.0
    )


def test_figures() -> None:
    found = report(30, 10, budget=0.25)
    assert (found.num_seen, found.bad_fraction, found.is_over_budget, found.rows_per_s) == (
        40,
        0.25,
        False,
        20.0,
    )
    assert report(30, 10, budget=0.24).is_over_budget
    assert not report(0, 0).is_over_budget and report(0, 0).bad_fraction == 0.0


def test_at_most_five_examples_a_reason() -> None:
    found = report(1, 30)
    assert found.reasons == {"html": 15, "truncated": 15}
    assert [example.place for example in found.examples["html"]] == [
        "/s/p0",
        "/s/p2",
        "/s/p4",
        "/s/p6",
        "/s/p8",
    ]
    assert found.notes == {"ignored_file": 1}


def test_json_round_trip(tmp_path: Path) -> None:
    found = report(1, 3)
    path = found.write(tmp_path / "reports")
    assert path.name == "ingest-00000003.json"
    read = json.loads(path.read_text())
    assert read["reasons"] == {"html": 2, "truncated": 1} and read["num_seen"] == 4
    assert read["examples"]["truncated"] == [{"place": "/s/p1", "key": "k1", "detail": "d"}]


def test_the_error_tells_counts_places_and_remedy() -> None:
    error = BadFractionError(report(97, 3))
    assert str(error) == (
        "3 of 100 samples (3.00%) cannot be used, the budget is 0.00%: 2 html (first: /s/p0); 1 truncated "
        "(first: /s/p1); the 97 good ones are committed; see `unirl quarantine store`, or raise "
        "max_bad_fraction"
    )
    assert isinstance(error, ValueError)
