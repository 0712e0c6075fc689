"""How healthy the data of a run is: what was kept, what was refused and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from storage import FeatureStore

__all__ = ["DataHealth", "Refusals", "data_health"]


_COUNTED = {
    "num_duplicate_content": "duplicate content",
    "num_reoriented": "turned upright",
    "num_with_alpha": "with transparency",
    "num_multi_frame": "with several frames",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Records that ingest refused for one reason."""

    reason: str
    num: int
    examples: Sequence[str]
    """Up to five places, with the detail of the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataHealth:
    """Counts of one snapshot of a data store."""

    path: str
    snapshot: int
    num_rows: int
    num_refused: int
    splits: Sequence[tuple[str, int]]
    refusals: Sequence[Refusals]
    remarks: Sequence[tuple[str, int]]
    """What the ingests noted without refusing a sample, such as duplicates and turned pictures."""

    @property
    def bad_fraction(self) -> float:
        """Refused over refused and kept; 0 for an empty store."""
        return self.num_refused / max(self.num_rows + self.num_refused, 1)


def data_health(store: FeatureStore) -> DataHealth:
    """Count the rows of each split and the refused records of each reason."""
    splits: list[tuple[str, int]] = []
    if "split" in store.columns:
        counted = store.query("SELECT split, count(*) AS num FROM samples GROUP BY split ORDER BY 2 DESC, 1")
        splits = [(str(row["split"]), int(row["num"])) for row in counted.to_pylist()]
    places: dict[str, list[str]] = {}
    for row in store.quarantined().select(["place", "reason"]).to_pylist():
        reason, _, detail = str(row["reason"]).partition(": ")
        places.setdefault(reason, []).append(f"{row['place']} ({detail})" if detail else str(row["place"]))
    refusals = [
        Refusals(reason=reason, num=len(found), examples=found[:5])
        for reason, found in sorted(places.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return DataHealth(
        path=str(store.path),
        snapshot=store.snapshot.id,
        num_rows=store.snapshot.num_rows,
        num_refused=sum(refusal.num for refusal in refusals),
        splits=splits,
        refusals=refusals,
        remarks=_remarks(store),
    )


def _remarks(store: FeatureStore) -> list[tuple[str, int]]:
    """Add up what the ingest reports up to this snapshot say; a report that cannot be read is left out."""
    counts: Counter[str] = Counter()
    for path in sorted((store.path / "reports").glob("ingest-*.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(report, dict) and report.get("snapshot", 0) <= store.snapshot.id:
            counts.update(report.get("notes", {}))
            counts.update({said: report.get(field, 0) for field, said in _COUNTED.items()})
    return [(name, num) for name, num in counts.most_common() if num]
