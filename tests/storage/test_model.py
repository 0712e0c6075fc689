"""Any sequence of changes to a store equals the same changes to a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage import DuplicateKeyError, FeatureStore

KEYS = st.one_of(
    st.integers(0, 40).map(lambda i: f"k{i}"),
    st.text(min_size=1, max_size=6),
    st.integers(510, 514).map(lambda n: "x" * n),
).filter(lambda key: key.encode("utf-8", "ignore").decode() == key)
BLOBS = st.one_of(st.none(), st.binary(max_size=40), st.integers(0, 9).map(lambda i: bytes([i]) * 5000))
NUMBERS = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))
ROWS = st.lists(st.tuples(KEYS, BLOBS, NUMBERS), max_size=6, unique_by=lambda row: row[0])


class StoreMachine(RuleBasedStateMachine):
    """`rows` is the model: row number -> (key, blob, number). `history` holds it for every snapshot."""

    @initialize()
    def create(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = FeatureStore.create(self.folder / "store")
        self.rows: dict[int, tuple] = {}
        self.next_row = 0
        self.column = "n"
        self.has_feature: set[int] = set()
        self.history: dict[int, tuple] = {}
        self.note()

    def note(self) -> None:
        self.store = self.store.refresh()
        self.history[self.store.snapshot.id] = (dict(self.rows), self.column, set(self.has_feature))

    def keys(self) -> set[str]:
        return {key for key, _, _ in self.rows.values()}

    def add(self, rows: list) -> None:
        for row in rows:
            self.rows[self.next_row] = row
            self.next_row += 1

    @rule(rows=ROWS)
    def append(self, rows: list) -> None:
        items = [{"key": key, "blob": blob, self.column: number} for key, blob, number in rows]
        if self.keys() & {key for key, _, _ in rows}:
            with pytest.raises(DuplicateKeyError):
                self.store.append(items)
            return
        self.store.append(items)
        self.add(rows)
        self.note()

    @rule(first=ROWS, second=ROWS)
    def append_from_two_writers(self, first: list, second: list) -> None:
        taken = self.keys() | {key for key, _, _ in first}
        first = [row for row in first if row[0] not in self.keys()]
        second = [row for row in second if row[0] not in taken]
        with self.store.writer() as slow:
            for key, blob, number in second:
                slow.add(key, blob, **{self.column: number})
            self.store.append({"key": key, "blob": blob, self.column: number} for key, blob, number in first)
        self.add(first)
        if first and second:
            self.history[slow.snapshot.id - 1] = (dict(self.rows), self.column, set(self.has_feature))
        self.add(second)
        self.note()

    @rule(modulus=st.integers(2, 5), rest=st.integers(0, 4))
    def delete(self, modulus: int, rest: int) -> None:
        self.store.delete(f"row % {modulus} = {rest}")
        self.rows = {row: value for row, value in self.rows.items() if row % modulus != rest}
        self.note()

    @rule(max_part_bytes=st.sampled_from([1, 100_000, 1 << 30]))
    def compact(self, max_part_bytes: int) -> None:
        self.store.compact(max_part_bytes=max_part_bytes)
        self.note()

    @rule()
    def rename(self) -> None:
        if self.column in self.store.snapshot.columns:
            new_name = {"n": "m", "m": "n"}[self.column]
            self.store.rename_column(self.column, new_name)
            self.column = new_name
            self.note()

    @precondition(lambda self: any("f" not in part.tensors for part in self.store.snapshot.parts))
    @rule()
    def add_feature(self) -> None:
        self.store.add_column("f", lambda view: view.rows * 3, dtype="int64", shape=())
        self.has_feature = set(range(self.next_row))
        self.note()

    @rule(back=st.integers(1, 3))
    def restore(self, back: int) -> None:
        known = sorted(self.history)
        number = known[-1 - min(back, len(known) - 1)]
        self.store.restore(number)
        self.rows, self.column, self.has_feature = (type(part)(part) for part in self.history[number])
        self.note()

    @rule()
    def collect(self) -> None:
        self.store.gc(grace_s=0, keep_last=3)
        kept = {snapshot.id for snapshot in self.store.snapshots()}
        self.history = {number: value for number, value in self.history.items() if number in kept}

    @rule()
    def reopen(self) -> None:
        self.store = FeatureStore.open(self.store.path, verify="always")

    @invariant()
    def equals_the_model(self) -> None:
        self.check(self.store, *self.history[self.store.snapshot.id])

    @rule()
    def older_snapshots_are_as_they_were(self) -> None:
        for number, model in self.history.items():
            self.check(self.store.at(number), *model)

    def check(self, store: FeatureStore, rows: dict, column: str, has_feature: set) -> None:
        assert len(store) == len(rows)
        view = store.select()
        assert view.rows.tolist() == sorted(rows)
        assert view.keys() == [rows[row][0] for row in sorted(rows)]
        if column in store.snapshot.columns:
            assert view.column(column).to_pylist() == [rows[row][2] for row in sorted(rows)]
        for row, (key, blob, _) in rows.items():
            assert store.row(key) == row
            if blob is not None:
                assert store.blob(row) == blob
        featured = np.array([row for row in sorted(rows) if row in has_feature], np.int64)
        if len(featured):
            assert store.tensor("f").gather(featured).tolist() == (featured * 3).tolist()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert self.store.verify().ok
            shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=6, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestLongStoreMachine(StoreMachine.TestCase):
    settings = settings(
        max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
