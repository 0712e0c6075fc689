"""Any sequence of changes to a store equals the same changes to a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage import DuplicateKeyError, FeatureStore, TensorColumnError

KEYS = st.one_of(
    st.integers(0, 40).map(lambda i: f"k{i}"),
    st.text(min_size=1, max_size=6),
    st.integers(510, 514).map(lambda n: "x" * n),
).filter(lambda key: key.encode("utf-8", "ignore").decode() == key)
BLOBS = st.one_of(st.none(), st.binary(max_size=40), st.integers(0, 9).map(lambda i: bytes([i]) * 5000))
NUMBERS = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))
ROWS = st.lists(st.tuples(KEYS, BLOBS, NUMBERS), max_size=6, unique_by=lambda row: row[0])
MODULI = st.integers(2, 5)
RESTS = st.integers(0, 4)


@dataclass
class Model:
    """What a snapshot holds. rows: number -> [key, blob, number in `column`]. featured: rows with a value."""

    rows: dict[int, list] = field(default_factory=dict)
    column: str = "n"
    has_column: bool = False
    feature: str = "f"
    has_feature: bool = False
    featured: set[int] = field(default_factory=set)

    def held_keys(self) -> set[str]:
        return {key for key, _, _ in self.rows.values()}

    def add(self, first: int, rows: list) -> int:
        for row in rows:
            self.rows[first] = list(row)
            first += 1
        self.has_column |= bool(rows)
        return first

    def lacking(self) -> list[int]:
        return [row for row in sorted(self.rows) if row not in self.featured]


class StoreMachine(RuleBasedStateMachine):
    """`model` is what the newest snapshot holds, `history` the same for every snapshot."""

    @initialize()
    def create(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = FeatureStore.create(self.folder / "store")
        self.model = Model()
        self.next_row = 0
        self.history: dict[int, Model] = {}
        self.tags: dict[str, int] = {}
        self.note()

    def note(self) -> None:
        self.store = self.store.refresh()
        self.history[self.store.snapshot.id] = deepcopy(self.model)

    def items(self, rows: list) -> list[dict]:
        return [{"key": key, "blob": blob, self.model.column: number} for key, blob, number in rows]

    @rule(rows=ROWS)
    def append(self, rows: list) -> None:
        if self.model.held_keys() & {key for key, _, _ in rows}:
            with pytest.raises(DuplicateKeyError):
                self.store.append(self.items(rows))
            return
        self.store.append(self.items(rows))
        self.next_row = self.model.add(self.next_row, rows)
        self.note()

    @rule(first=ROWS, second=ROWS)
    def append_from_two_writers(self, first: list, second: list) -> None:
        taken = self.model.held_keys() | {key for key, _, _ in first}
        first = [row for row in first if row[0] not in self.model.held_keys()]
        second = [row for row in second if row[0] not in taken]
        with self.store.writer() as slow:
            for item in self.items(second):
                slow.add(**item)
            self.store.append(self.items(first))
        self.next_row = self.model.add(self.next_row, first)
        if first and second:
            self.history[slow.snapshot.id - 1] = deepcopy(self.model)
        self.next_row = self.model.add(self.next_row, second)
        self.note()

    @rule(rows=ROWS, change=st.sampled_from(["delete", "compact", "feature"]), modulus=MODULI, rest=RESTS)
    def change_while_another_handle_appends(self, rows: list, change: str, modulus: int, rest: int) -> None:
        rows = [row for row in rows if row[0] not in self.model.held_keys()]
        other = FeatureStore.open(self.store.path)
        with other.writer() as slow:
            for item in self.items(rows):
                slow.add(**item)
            if change == "delete":
                self.delete(modulus, rest)
            elif change == "compact":
                self.compact(1 << 30)
            else:
                self.add_sparse_feature(modulus, rest)
        self.next_row = self.model.add(self.next_row, rows)
        self.note()

    @rule(modulus=MODULI, rest=RESTS)
    def delete(self, modulus: int, rest: int) -> None:
        self.store.delete(f"row % {modulus} = {rest}")
        rows = self.model.rows
        self.model.rows = {row: value for row, value in rows.items() if row % modulus != rest}
        self.note()

    @rule(max_part_bytes=st.sampled_from([1, 100_000, 1 << 30]))
    def compact(self, max_part_bytes: int) -> None:
        self.store.compact(max_part_bytes=max_part_bytes)
        self.note()

    @precondition(lambda self: self.model.has_column)
    @rule(drop=st.booleans())
    def rename_or_drop_column(self, drop: bool) -> None:
        model = self.model
        if drop:
            self.store.drop_column(model.column)
            model.has_column = False
            for row in model.rows.values():
                row[2] = None
        else:
            new_name = {"n": "m", "m": "n"}[model.column]
            self.store.rename_column(model.column, new_name)
            model.column = new_name
        self.note()

    @precondition(lambda self: self.model.has_feature)
    @rule(drop=st.booleans())
    def rename_or_drop_feature(self, drop: bool) -> None:
        model = self.model
        if drop:
            self.store.drop_column(model.feature)
            model.has_feature, model.featured = False, set()
        else:
            new_name = {"f": "g", "g": "f"}[model.feature]
            self.store.rename_column(model.feature, new_name)
            model.feature = new_name
        self.note()

    @rule(workers=st.sampled_from([1, 2]))
    def add_feature(self, workers: int) -> None:
        def compute(view):
            return view.rows * 3

        if not self.model.lacking():
            with pytest.raises(TensorColumnError, match=r"already|no rows yet"):
                self.store.add_column(self.model.feature, compute, dtype="int64", shape=())
            return
        self.store.add_column(self.model.feature, compute, dtype="int64", shape=(), workers=workers)
        self.model.has_feature = True
        self.model.featured |= set(self.model.rows)
        self.note()

    @rule(modulus=MODULI, rest=RESTS)
    def add_sparse_feature(self, modulus: int, rest: int) -> None:
        if not self.model.lacking():
            return
        rows = [row for row in self.model.lacking() if row % modulus == rest]
        pairs = [(self.model.rows[row][0], np.array(row * 3)) for row in rows[::-1]]
        self.store.add_column(self.model.feature, pairs, dtype="int64", shape=(), sparse=True)
        self.model.has_feature = True
        self.model.featured |= set(rows)
        self.note()

    @rule(name=st.sampled_from(["a", "b"]))
    def tag(self, name: str) -> None:
        if name in self.tags:
            self.store.untag(name)
            del self.tags[name]
        else:
            self.store.tag(name)
            self.tags[name] = self.store.snapshot.id
        assert self.store.tags() == self.tags

    @rule(back=st.integers(1, 3))
    def restore(self, back: int) -> None:
        known = sorted(self.history)
        number = known[-1 - min(back, len(known) - 1)]
        self.store.restore(number)
        self.model = deepcopy(self.history[number])
        self.note()

    @rule()
    def collect(self) -> None:
        self.store.gc(grace_s=0, keep_last=3)
        kept = {snapshot.id for snapshot in self.store.snapshots()}
        assert set(self.tags.values()) | set(sorted(self.history)[-3:]) <= kept
        self.history = {number: value for number, value in self.history.items() if number in kept}

    @rule()
    def reopen(self) -> None:
        self.store = FeatureStore.open(self.store.path, verify="always")

    @invariant()
    def equals_the_model(self) -> None:
        self.check(self.store, self.history[self.store.snapshot.id])

    @rule()
    def older_snapshots_are_as_they_were(self) -> None:
        for number, model in self.history.items():
            self.check(self.store.at(number), model)
        for name, number in self.tags.items():
            assert self.store.at(name).snapshot.id == number

    def check(self, store: FeatureStore, model: Model) -> None:
        rows = sorted(model.rows)
        view = store.select()
        assert len(store) == len(rows) and view.rows.tolist() == rows
        assert view.keys() == [model.rows[row][0] for row in rows]
        assert (model.column in store.snapshot.columns) == model.has_column
        if model.has_column:
            assert view.column(model.column).to_pylist() == [model.rows[row][2] for row in rows]
        for row in rows:
            key, blob, _ = model.rows[row]
            assert store.row(key) == row
            if blob is not None:
                assert store.blob(row) == blob
        assert (model.feature in store.tensor_columns) == model.has_feature
        if model.has_feature:
            self.check_feature(store, model, view.rows)

    def check_feature(self, store: FeatureStore, model: Model, rows: np.ndarray) -> None:
        column = store.tensor(model.feature)
        has = np.array([row in model.featured for row in rows.tolist()], bool)
        assert column.has(rows).tolist() == has.tolist()
        assert column.present().rows.tolist() == rows[has].tolist()
        assert column.gather(rows, fill=-1).tolist() == np.where(has, rows * 3, -1).tolist()
        if not has.all():
            with pytest.raises(TensorColumnError, match="has no tensor"):
                column.gather(rows)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert self.store.verify().ok
            shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=6, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestLongStoreMachine(StoreMachine.TestCase):
    settings = settings(
        max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
