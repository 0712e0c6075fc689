"""What the writers of a soak do to a store, and the proof that nothing of it was lost.

Each row follows from its key, so that a reader can tell what it must hold. Each writer notes what the store
told it was committed in a journal beside the store.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from storage import ColumnError, CommitConflictError, FeatureStore, TensorColumnError
from storage.view import View

__all__ = ["ACTIONS", "act", "check", "create", "journal_of", "perform", "read"]

_ROWS = 12
_COLUMNS = ("c0", "c1")
_SHAPE = (16, 8)


def create(path: Path) -> None:
    """Make a store with a few rows."""
    FeatureStore.create(path)
    perform("append", path, "first", 0)


def journal_of(path: Path) -> Path:
    """Where writers note what was committed: one line of two words each."""
    return path.with_name(f"{path.name}.journal")


def _note(path: Path, what: str, name: str) -> None:
    fd = os.open(journal_of(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{what} {name}\n".encode())
    os.close(fd)


def _number(key: str) -> int:
    return zlib.crc32(key.encode())


def _blob(key: str) -> bytes:
    return key.encode() * (1 + _number(key) % 400)


def _append(path: Path, writer: str, count: int) -> None:
    keys = [f"{writer}-{count}-{i}" for i in range(_ROWS)]
    with FeatureStore.open(path).writer(message=f"append {keys[0]}") as commit:
        for i, key in enumerate(keys):
            number = _number(key)
            tensor = np.full(_SHAPE, number, np.int64)
            commit.add(key, _blob(key), {"x": tensor}, number=number, doomed=i % 4 == 3, note=key)
        commit.quarantine(key=f"q-{keys[0]}", place="nowhere", reason="soak", data=b"bad")
    _note(path, "rows", f"{writer}-{count}")


def _number_of_row(view: View) -> np.ndarray:
    keys = view.keys()
    return np.array([_number(key) for key in keys], np.int64)


def _add_column(path: Path, writer: str, count: int) -> None:
    store = FeatureStore.open(path)
    name = _COLUMNS[count % len(_COLUMNS)]
    try:
        store.add_column(name, _number_of_row, dtype="int64", shape=())
    except (CommitConflictError, TensorColumnError):
        return  # Another writer computed or compacted the same rows first, or every row has the column.
    _note(path, "column", name)


def _rename(path: Path, writer: str, count: int) -> None:
    names = ("note", "remark")
    try:
        FeatureStore.open(path).rename_column(names[count % 2], names[1 - count % 2])
    except ColumnError:
        return  # Another writer renamed it first, or appended rows under the other name.


def _compact(path: Path, writer: str, count: int) -> None:
    try:
        FeatureStore.open(path).compact(max_part_bytes=1 << (16 + count % 8))
    except CommitConflictError:
        return


def _delete(path: Path, writer: str, count: int) -> None:
    FeatureStore.open(path).delete("doomed")


def _gc(path: Path, writer: str, count: int) -> None:
    FeatureStore.open(path).gc(grace_s=0, keep_last=2)


def _tag(path: Path, writer: str, count: int) -> None:
    name = f"{writer}-{count}"
    FeatureStore.open(path).tag(name)
    _note(path, "tag", name)


ACTIONS: dict[str, Callable[[Path, str, int], None]] = {
    "append": _append,
    "add_column": _add_column,
    "rename": _rename,
    "compact": _compact,
    "delete": _delete,
    "gc": _gc,
    "tag": _tag,
}


def perform(action: str, path: Path, writer: str, count: int) -> None:
    """Do one action. `writer` and `count` together must not have been used before."""
    ACTIONS[action](path, writer, count)


def act(path: Path, writer: str, seed: int, times: int = 1 << 30) -> None:
    """Do one action after the other; without `times`, until the process is killed."""
    rng = random.Random(seed)
    for count in range(times):
        perform(rng.choice(["append", "append", *ACTIONS]), path, writer, count)


def read(path: Path) -> None:
    """Read everything that the newest snapshot shows, with a handle of its own."""
    _check_rows(FeatureStore.open(path), set())


def check(path: Path, writer: str) -> None:
    """Open the store and compare everything with the journal, then commit once more.

    Raises:
        AssertionError: With what is missing or different.
    """
    noted = [line.split() for line in journal_of(path).read_text(encoding="utf-8").splitlines()]
    store = FeatureStore.open(path, verify="always")
    report = store.verify()
    assert report.ok, report.problems
    _check_rows(store, {name for what, name in noted if what == "rows"})
    tags = store.tags()
    for what, name in noted:
        assert what != "tag" or store.at(tags[name]).verify().ok
        assert what != "column" or name in store.tensor_columns, f"column {name} is missing"
    before = store.snapshot.id
    perform("append", path, writer, 0)
    assert FeatureStore.open(path).snapshot.id == before + 1


def _check_rows(store: FeatureStore, commits: set[str]) -> None:
    view = store.select()
    keys = view.keys()
    assert len(set(keys)) == len(keys) == len(store)
    present = set(keys)
    wanted = {f"{commit}-{i}" for commit in commits for i in range(_ROWS) if i % 4 != 3}
    assert wanted <= present, f"published rows are missing: {sorted(wanted - present)[:5]}"
    whole = {key.rpartition("-")[0] for key in keys}
    lost = {f"{commit}-{i}" for commit in whole for i in range(_ROWS) if i % 4 != 3} - present
    assert not lost, f"half a commit is visible: {sorted(lost)[:5]} are missing"
    numbers = np.array([_number(key) for key in keys], np.int64)
    assert view.column("number").to_pylist() == numbers.tolist()
    tensors = store.tensor("x").gather(view.rows)
    assert (tensors == numbers[:, None, None]).all()
    for row, key in list(zip(view.rows.tolist(), keys))[:: max(1, len(keys) // 50)]:
        assert store.row(key) == row and store.blob(row) == _blob(key)
    for name in set(_COLUMNS) & store.tensor_columns.keys():
        _check_column(store, name, view, numbers)


def _check_column(store: FeatureStore, name: str, view: View, numbers: np.ndarray) -> None:
    part_of, _ = store.row_map.locate(view.rows)
    has = np.isin(part_of, [i for i, part in enumerate(store.snapshot.parts) if name in part.tensors])
    assert (store.tensor(name).gather(view.rows[has]) == numbers[has]).all()
