from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from storage import ColumnTypeError, DuplicateKeyError, FeatureStore, TensorColumnError


def check_whole(path: Path) -> FeatureStore:
    """Everything that was published is there, and nothing else is seen."""
    store = FeatureStore.open(path, verify="always")
    report = store.verify()
    assert report.ok, report.problems
    table = store.query("SELECT row, key, number FROM samples ORDER BY row").to_pydict()
    assert table["key"] == [f"k{number}" for number in table["number"]]
    assert len(table["row"]) == len(set(table["key"])) == store.snapshot.num_rows
    for row, number in list(zip(table["row"], table["number"]))[:: max(1, len(table["row"]) // 20)]:
        assert store.row(f"k{number}") == row
        assert store.blob(row) == b"blob %d" % number * 50
        assert store.tensor("x")[row : row + 1].tolist() == [[number] * 4]
    return store


@pytest.mark.parametrize(
    ("action", "stride"),
    [("append", 9), ("column", 4), pytest.param("append", 1, marks=pytest.mark.slow)],
)
def test_a_kill_at_any_step_leaves_the_last_snapshot_whole(
    tmp_path, forkserver, killed_programs, action, stride
):
    path = FeatureStore.create(tmp_path / "store").path
    killed_programs.append(path, 0, 20)
    step = killed = 0
    while True:
        child = forkserver.Process(target=killed_programs.killed_at_step, args=(action, path, step))
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        killed += 1
        store = check_whole(path)
        if store.snapshot.id > 1:
            assert store.snapshot.num_rows == (40 if action == "append" else 20)
            store.restore(1)
        step += stride
    assert killed > 3
    store = check_whole(path)
    assert ("late" in store.tensor_columns) == (action == "column")
    orphans = store.gc(grace_s=0).removed
    assert orphans and not list((path / "staging").iterdir())
    check_whole(path)


@pytest.mark.slow
def test_two_writers_killed_at_random_lose_nothing(tmp_path, forkserver, killed_programs):
    path = FeatureStore.create(tmp_path / "store").path
    killed_programs.append(path, 0, 10)
    seen = 10
    rng = random.Random(0)
    for round_number in range(6):
        children = [
            forkserver.Process(target=killed_programs.append_for_ever, args=(path, 1 + 2 * round_number + i))
            for i in range(2)
        ]
        for child in children:
            child.start()
        while len(FeatureStore.open(path)) == seen:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        for child in children:
            child.kill()
            child.join()
        store = check_whole(path)
        assert store.snapshot.num_rows > seen
        seen = store.snapshot.num_rows
    store.gc(grace_s=0)
    check_whole(path)


def test_racing_writers_all_get_in(tmp_path, forkserver, killed_programs):
    path = FeatureStore.create(tmp_path / "store").path
    children = [forkserver.Process(target=killed_programs.append_some, args=(path, i, 5)) for i in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    store = check_whole(path)
    assert store.snapshot.id == 15 and len(store) == 150
    assert [s.parent for s in store.snapshots()][1:] == list(range(15))


def test_racing_threads_all_get_in(empty, killed_programs):
    threads = [
        threading.Thread(target=killed_programs.append_some, args=(empty.path, i, 4)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(check_whole(empty.path)) == 160


def test_the_second_of_two_overlapping_commits_goes_on_top(empty, codes_of):
    with empty.writer(message="slow") as slow:
        slow.add("a", b"1", {"x": codes_of(1)}, n=1)
        with empty.writer(message="fast") as fast:
            fast.add("b", b"2", {"x": codes_of(2)}, n=2, m="new")
        slow.add("c", b"3", {"x": codes_of(3)}, n=3, late=True)
    store = empty.refresh()
    assert (fast.snapshot.id, slow.snapshot.id, slow.snapshot.parent) == (1, 2, 1)
    assert store.select().keys() == ["b", "a", "c"]
    assert np.array_equal(store.tensor("x").gather(np.array([2]))[0], codes_of(3))
    assert set(store.columns) >= {"n", "m", "late"}


def test_a_conflict_with_a_faster_writer_is_refused_whole(empty):
    cases = [
        (
            {"key": "same"},
            {"key": "same"},
            DuplicateKeyError,
            "another writer published it meanwhile as row 0",
        ),
        ({"key": "a", "n": 1}, {"key": "b", "n": "x"}, ColumnTypeError, "'n' is string, but int since part"),
        ({"key": "c", "Cap": 1}, {"key": "d", "cAP": 1}, Exception, "differ only in case"),
        (
            {"key": "e", "tensors": {"x": np.zeros(2)}},
            {"key": "f", "tensors": {"x": np.zeros(3)}},
            TensorColumnError,
            "in snapshot",
        ),
    ]
    for fast_row, slow_row, error, text in cases:
        before = empty.refresh()
        with pytest.raises(error, match=text), empty.writer() as slow:
            slow.add(**slow_row)
            empty.append([fast_row])
        after = empty.refresh()
        assert after.snapshot.id == before.snapshot.id + 1 and after.verify().ok
        assert after.gc(grace_s=0).removed == []
