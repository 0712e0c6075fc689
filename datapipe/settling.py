"""What a judged item comes to after a look at the store and at what the run has met before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Literal

from datapipe.identity import content_of, key_id, picture_id
from datapipe.judge import Row
from datapipe.judge_texts import TextColumns
from datapipe.known_rows import KnownRows, place_of_content, place_of_row
from datapipe.open_faults import OpenFaults
from datapipe.outcomes import Met, Outcome, Resolved, Skip, SourceEnd, SourceProgress
from datapipe.sources import Fault
from datapipe.tally import Tally
from storage import FeatureStore, KeyNotFoundError

__all__ = ["DuplicatePolicy", "Settling", "may_be_left_out"]

DuplicatePolicy = Literal["once", "keep"]

_TEXT_COLUMNS: Final = frozenset({"messages", "chosen"})  # what a row says beside its caption
_PART_COLUMNS: Final = frozenset({"num_media", "media_of", "pair"})  # of samples with several media


class Settling:
    """Refuses keys that were met before, and leaves out samples that differ in their key alone."""

    def __init__(
        self,
        store: FeatureStore | None,
        known: KnownRows,
        faults: OpenFaults,
        *,
        met: Met,
        first_row: int | None = None,
        duplicates: DuplicatePolicy,
        tally: Tally,
        progress: Sequence[SourceProgress],
    ) -> None:
        """Args:
        store: Its newest snapshot; None for a store that is not made yet.
        known: Its rows; grows by what is met.
        faults: Its open quarantine.
        met: What other runs of the same ingest take.
        first_row: Rows of the store from this number on are of the same ingest: a sample with the key of one
            was met twice, and is not known from before.
        duplicates: Whether a sample that differs from another one in its key alone is left out.
        tally: Counts such samples.
        progress: Of each source; counts the samples that are left out.
        """
        self._newest = store
        self._known = known
        self._faults = faults
        self._met = met
        self._first_row = first_row
        self._duplicates = duplicates
        self._tally = tally
        self._progress = progress
        self._pending: dict[str, str] = {}  # key -> place, of the rows in the open commit
        self._pending_contents: dict[int, str] = {}  # content -> place, likewise

    def committed(self, store: FeatureStore) -> None:
        """The open commit is in the store: places are looked up there from now on."""
        self._pending.clear()
        self._pending_contents.clear()
        self._newest = store

    def settle(self, outcome: Outcome) -> Iterator[Outcome]:
        """What an outcome comes to, after a look at what was met before."""
        result = outcome.result
        if isinstance(result, SourceEnd):
            yield from self._resolved(outcome, self._faults.settled_by(outcome.source))
        elif isinstance(result, TextColumns):
            if self._are_new(result, outcome.source.base):
                yield from self._resolved(outcome, self._faults.found_again(result.keys))
                yield outcome
                return
            for row in result.rows(outcome.source.name):
                known = self._known.find(row.key)
                is_there = known is not None and (known.source, known.place) == (row.source, row.place)
                settled = self._settle_one(
                    replace(outcome, result=Skip(row.key, row.place) if is_there else row)
                )
                if settled is not None:
                    yield from self._in_place_of_others(settled)
        elif (settled := self._settle_one(outcome)) is not None:
            yield from self._in_place_of_others(settled)

    def _in_place_of_others(self, outcome: Outcome) -> Iterator[Outcome]:
        """A fault settles what is said about its place for another reason; a row, that it was lost."""
        result = outcome.result
        if isinstance(result, Fault) and self._faults.outdates(outcome.full_place, result.reason):
            yield replace(outcome, result=Resolved(outcome.full_place))
        elif isinstance(result, Row):
            yield from self._resolved(outcome, self._faults.found_again([result.key]))
        yield outcome

    @staticmethod
    def _resolved(outcome: Outcome, places: Sequence[str]) -> Iterator[Outcome]:
        return (replace(outcome, result=Resolved(place)) for place in places)

    def _are_new(self, rows: TextColumns, base: str) -> bool:
        """Whether no key was met before; if so, all count as met now."""
        identities = set(map(key_id, rows.keys))
        if len(identities) < len(rows) or self._known.seen_keys.has_any(identities):
            return False
        if self._known.has_any(identities) or not self._met.keys.keys().isdisjoint(rows.keys):
            return False
        self._known.seen_keys.add_new(identities)
        self._pending.update(zip(rows.keys, (f"{base}/{place}" for place in rows.places)))
        return True

    def _settle_one(self, outcome: Outcome) -> Outcome | None:
        """Refuse a key that was met before in this run, or that the store has with another content.

        Returns:
            None for a sample that is left out because another row has the same picture, caption and columns.
        """
        result = outcome.result
        if not isinstance(result, Row | Skip):
            return outcome
        identity = key_id(result.key)
        if result.key in self._met.keys:
            return replace(outcome, result=_duplicate(result, outcome.full_place, self._met.keys[result.key]))
        if not self._known.seen_keys.add(identity):
            first = self._pending.get(result.key) or self._committed_place(result.key)
            if first is not None:
                return replace(outcome, result=_duplicate(result, outcome.full_place, first))
        if isinstance(result, Skip):
            return outcome
        known = self._known.find(result.key)
        if known is not None:
            is_from_before = self._first_row is None or known.row < self._first_row
            is_same = known.content_hash == result.content_hash and known.caption == result.caption
            if is_from_before and is_same and not _TEXT_COLUMNS & result.columns.keys():
                return replace(outcome, result=Skip(result.key, result.place))
            return replace(outcome, result=_duplicate(result, outcome.full_place, known.full_place))
        if self._is_left_out(result, outcome):
            return None
        self._pending[result.key] = outcome.full_place
        return outcome

    def _is_left_out(self, row: Row, outcome: Outcome) -> bool:
        """Count a sample that differs from another one in its key alone; tell whether it is left out."""
        digest = row.content_hash
        if digest is None or not may_be_left_out(row):
            return False
        content, picture = content_of(row, digest), picture_id(digest)
        if content not in self._met.contents and self._known.contents.add(content):
            self._tally.num_shared_pictures += not self._known.pictures.add(picture)
            self._pending_contents[content] = outcome.full_place
            return False
        is_kept = self._duplicates == "keep"
        self._tally.add_duplicate(
            row,
            outcome.full_place,
            is_kept=is_kept,
            first_place=lambda: self._place_of_content(content, digest, row.caption),
        )
        if not is_kept:
            self._progress[outcome.source_index].num_samples += 1
        return not is_kept

    def _place_of_content(self, content: int, digest: str, caption: str | None) -> str:
        place = self._met.contents.get(content) or self._pending_contents.get(content)
        if place is None and self._newest is not None:
            place = place_of_content(self._newest, digest, caption)
        return place or "another row"

    def _committed_place(self, key: str) -> str | None:
        try:
            return None if self._newest is None else place_of_row(self._newest, key)
        except KeyNotFoundError:
            return None  # two keys of one hash


def may_be_left_out(row: Row) -> bool:
    """Whether a row is a sample of its own, so that it may be left out when another one is the same."""
    return not _PART_COLUMNS & row.columns.keys()


def _duplicate(result: Row | Skip, full_place: str, first: str) -> Fault:
    return Fault(
        key=result.key,
        place=result.place,
        reason="duplicate_key",
        detail=f"key {result.key!r} stands at {first} and at {full_place}; the first was kept",
        data=(result.blob or b"") if isinstance(result, Row) else b"",
    )
