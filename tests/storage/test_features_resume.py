"""add_column: killed and begun again, in parallel, with a model's name, beside other writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import pytest

from storage import CommitConflictError, FeatureStore, StorageError, TensorColumnError
from storage import feature_values as feature_values_module
from storage.backends import MemoryBackend
from storage.manifest import ModelRecord


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(feature_values_module, "_CHUNK_ROWS", 16)


class Doubled:
    """Twice the row; fails when it is asked for a row at or beyond `until`."""

    def __init__(self, until: int = 1 << 60) -> None:
        self.until = until
        self.asked: list[int] = []

    def __call__(self, view):
        self.asked += view.rows.tolist()
        if view.rows[-1] >= self.until:
            raise RuntimeError("out of memory")
        return view.rows * 2


def add(store: FeatureStore, compute, **options):
    return store.add_column("f", compute, dtype="int64", shape=(), **options)


def values(store: FeatureStore) -> list[int]:
    store = store.refresh()
    return store.tensor("f").gather(store.select().rows).tolist()


def journals(store: FeatureStore) -> list[str]:
    return [path.name for path in (store.path / "staging").iterdir() if path.name.startswith("column-")]


def test_a_run_that_failed_goes_on_where_it_was(filled):
    first = Doubled(until=50)
    with pytest.raises(RuntimeError, match="out of memory"):
        add(filled, first)
    assert filled.refresh().snapshot.id == 2 and len(journals(filled)) == 1
    filled.gc()
    second = Doubled()
    seen = []
    add(filled, second, progress=lambda done, total: seen.append((done, total)))
    assert second.asked == list(range(48, 100)) and values(filled) == list(range(0, 200, 2))
    assert seen[0] == (64, 100) and seen[-1] == (100, 100)
    assert journals(filled) == [] and filled.refresh().verify().ok


def test_other_arguments_begin_anew(filled):
    with pytest.raises(RuntimeError):
        add(filled, Doubled(until=50), model="m", model_hash="1")
    other = Doubled()
    add(filled, other, model="m", model_hash="2")
    assert other.asked == list(range(100))
    assert len(journals(filled)) == 1
    assert filled.gc(grace_s=0).removed and journals(filled) == []


def test_a_changed_function_begins_anew(filled):
    def fails(view):
        if view.rows[0] > 20:
            raise RuntimeError
        return view.rows * 2

    with pytest.raises(RuntimeError):
        add(filled, fails)
    asked = []

    def other(view):
        asked.extend(view.rows.tolist())
        return view.rows * 3

    add(filled, other)
    assert asked == list(range(100)) and values(filled)[50] == 150


@pytest.mark.parametrize("bind", ["closure", "partial", "default"])
def test_another_number_in_the_function_begins_anew(filled, bind):
    def times(factor, fails):
        def compute(view, factor=factor if bind == "default" else None, *, bound=None):
            if fails[0] and view.rows[0] > 20:
                raise RuntimeError
            return view.rows * (bound or factor or closed)

        closed = factor if bind == "closure" else 1
        return partial(compute, bound=factor) if bind == "partial" else compute

    with pytest.raises(RuntimeError):
        add(filled, times(2, [True]))
    add(filled, times(5, [False]))
    assert values(filled) == list(range(0, 500, 5))


def test_rows_may_come_and_go_between_two_runs(filled, filler):
    with pytest.raises(RuntimeError):
        add(filled, Doubled(until=70))
    filler(filled, 100, 110)
    filled.delete("width in (3, 90)")
    filled.compact()
    second = Doubled()
    add(filled, second)
    assert second.asked == [i for i in range(64, 110) if i != 90]
    assert values(filled) == [2 * i for i in range(110) if i not in (3, 90)]
    assert filled.refresh().verify().ok


def test_a_damaged_journal_is_cut_at_the_damage(filled):
    with pytest.raises(RuntimeError):
        add(filled, Doubled(until=70))
    (log,) = (filled.path / "staging").glob("column-*/values.log")
    content = bytearray(log.read_bytes())
    content[len(content) // 2 + 20] ^= 4
    log.write_bytes(content[:-3])
    second = Doubled()
    add(filled, second)
    assert second.asked == list(range(32, 100)) and values(filled) == list(range(0, 200, 2))


def test_a_killed_run_goes_on_where_it_was(filled):
    script = textwrap.dedent("""
        import os, signal, sys
        from storage import FeatureStore, feature_values

        feature_values._CHUNK_ROWS = 16

        def compute(view):
            with open(sys.argv[2], "a") as file:
                print(*view.rows.tolist(), sep="\\n", file=file)
            if len(sys.argv) > 3 and view.rows[0] >= 32:
                os.kill(os.getpid(), signal.SIGKILL)
            return view.rows * 2

        FeatureStore.open(sys.argv[1]).add_column("f", compute, dtype="int64", shape=())
    """)
    asked = filled.path.parent / "asked"
    command = [sys.executable, "-c", script, str(filled.path), str(asked)]
    assert subprocess.run([*command, "die"], check=False).returncode == -signal.SIGKILL
    filled.gc()
    asked.unlink()
    subprocess.run(command, check=True)
    assert [int(line) for line in asked.read_text().split()] == list(range(32, 100))
    assert values(filled) == list(range(0, 200, 2)) and journals(filled) == []


def double(view):
    return view.rows * 2


@pytest.mark.parametrize("kind", ["threads", "executor"])
def test_threads_change_nothing(filled, kind):
    barrier = threading.Barrier(2, timeout=20)

    def compute(view):
        if view.rows[0] < 32:
            barrier.wait()
        return view.rows * 2

    if kind == "threads":
        snapshot = add(filled, compute, workers=2)
    else:
        with ThreadPoolExecutor(2) as pool:
            snapshot = add(filled, compute, workers=pool)
    assert values(filled) == list(range(0, 200, 2))
    filled.restore(2)
    again = add(filled, double)
    for one, two in zip(snapshot.parts, again.parts):
        assert one.tensors["f"].xxh3 == two.tensors["f"].xxh3


def test_a_pool_of_processes(filled):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        add(filled, double, workers=pool)
    assert values(filled) == list(range(0, 200, 2))


def test_an_error_in_a_thread_keeps_what_came_before(filled):
    with pytest.raises(RuntimeError, match="out of memory"):
        add(filled, Doubled(until=60), workers=2)
    second = Doubled()
    add(filled, second, workers=2)
    assert min(second.asked) == 48 and values(filled) == list(range(0, 200, 2))


def test_the_model_is_recorded(filled, filler):
    add(filled, double, model="siglip-b16", model_hash="9f2c")
    store = filled.refresh()
    record = ModelRecord(name="siglip-b16", hash="9f2c")
    assert store.tensor_models == {"codes": None, "f": record} and store.tensor("f").model == record
    assert store.tensor_columns["f"] == (np.dtype("int64"), ())
    assert FeatureStore.open(store.path).snapshot.tensors["f"].model == record
    filler(store, 100, 102)
    for wrong in ({"model": "other"}, {"model": "siglip-b16", "model_hash": "77"}, {}):
        with pytest.raises(TensorColumnError, match=r"computed by model 'siglip-b16' \(hash 9f2c\)"):
            add(store, double, **wrong)
    add(store, double, model="siglip-b16", model_hash="9f2c")
    store.refresh().rename_column("f", "g")
    store.compact()
    assert store.refresh().tensor("g").model == record


@pytest.mark.parametrize(("name", "digest"), [(5, None), ("a", 5), ("a", b"1"), ("\ud800", None)])
def test_a_model_that_no_snapshot_can_name(filled, name, digest):
    calls = []
    with pytest.raises(StorageError, match="nothing was committed"):
        filled.add_column("x", calls.append, dtype="f4", shape=(), model=name, model_hash=digest)
    assert calls == [] and filled.refresh().snapshot.id == filled.snapshot.id


def test_two_runs_of_the_same_column_at_once(filled):
    def compute(view):
        if view.rows[0] == 0 and not inner:
            inner.append(True)
            with pytest.raises(CommitConflictError, match="another run computes tensor 'f'"):
                add(filled, compute)
        return view.rows * 2

    inner: list[bool] = []
    add(filled, compute)
    assert values(filled) == list(range(0, 200, 2))


def test_a_compaction_meanwhile_costs_no_work(filled):
    asked = []

    def compute(view):
        if view.rows[0] == 0:
            filled.delete("width in (7, 61)")
            filled.compact()
        asked.extend(view.rows.tolist())
        return view.rows * 2

    add(filled, compute)
    assert asked == list(range(100))
    assert values(filled) == [2 * i for i in range(100) if i not in (7, 61)]
    assert filled.refresh().verify().ok and filled.gc(grace_s=0).removed == []


def test_a_store_in_memory(filler):
    store = filler(FeatureStore.create(MemoryBackend("features")), 0, 60)
    with pytest.raises(RuntimeError):
        add(store, Doubled(until=30))
    second = Doubled()
    add(store, second, workers=2)
    assert sorted(second.asked) == list(range(60)) and values(store) == list(range(0, 120, 2))
    store.add_column("some", [("k00007", np.array(7))], dtype="int64", shape=(), sparse=True)
    assert store.refresh().tensor("some").present().rows.tolist() == [7]
    assert store.refresh().search("sample 7").rows.tolist()[0] == 7


def test_pairs_in_any_order_in_small_batches(filled):
    order = np.random.default_rng(0).permutation(100)
    filled.add_column("f", ((f"k{i:05d}", np.array(2 * i)) for i in order), dtype="int64", shape=())
    assert values(filled) == list(range(0, 200, 2))
    assert os.listdir(filled.path / "staging") == []  # noqa: PTH208
