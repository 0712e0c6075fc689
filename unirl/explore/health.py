"""How healthy the data of a run is: what was kept, what was refused and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage import FeatureStore

__all__ = ["DataHealth", "Refusals", "data_health"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Records that ingest refused for one reason."""

    reason: str
    num: int
    examples: Sequence[str]
    """Up to five places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataHealth:
    """Counts of one snapshot of a data store."""

    path: str
    snapshot: int
    num_rows: int
    num_refused: int
    splits: Sequence[tuple[str, int]]
    refusals: Sequence[Refusals]

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
        places.setdefault(str(row["reason"]), []).append(str(row["place"]))
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
    )
