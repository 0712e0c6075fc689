"""The journal of an `add_column` that was stopped: what is whole in it is used, the rest is done again."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore
from storage.view import View


class _Compute:
    """Gives each row its number, a few rows at a time, and stops when it was asked too often."""

    limit = 1 << 30
    seen: list[int]

    def __call__(self, view: View) -> np.ndarray:
        if len(self.seen) >= self.limit:
            raise KeyboardInterrupt
        self.seen += view.rows.tolist()
        return view.rows.astype(np.int64)


@pytest.fixture
def stopped(tmp_path) -> FeatureStore:
    """A store with a journal that holds three records."""
    store = FeatureStore.create(tmp_path / "store")
    for start in range(0, 4000, 2000):
        store.append({"key": f"k{i}", "number": i} for i in range(start, start + 2000))
    compute = _Compute()
    compute.seen, compute.limit = [], 3000
    with pytest.raises(KeyboardInterrupt):
        FeatureStore.open(store.path).add_column("y", compute, dtype="int64", shape=())
    return store.refresh()


def journal(store: FeatureStore) -> Path:
    (path,) = (store.path / "staging").glob("column-*/values.log")
    return path


def finish(store: FeatureStore) -> list[int]:
    """Run again to the end; the rows that were computed this time."""
    compute = _Compute()
    compute.seen = []
    store.add_column("y", compute, dtype="int64", shape=())
    newest = store.refresh()
    assert newest.tensor("y").gather(np.arange(4000)).tolist() == list(range(4000))
    assert newest.verify().ok and not list((store.path / "staging").iterdir())
    return compute.seen


def test_a_whole_journal_is_used(stopped):
    assert len(finish(stopped)) < 2000


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.999])
def test_a_journal_that_was_cut_is_used_up_to_there(stopped, share):
    path = journal(stopped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert len(finish(stopped)) >= 4000 * (1 - share) * 0.5


@pytest.mark.parametrize("seed", range(6))
def test_a_journal_with_a_flipped_bit_gives_no_wrong_value(stopped, seed):
    path = journal(stopped)
    content = bytearray(path.read_bytes())
    rng = random.Random(seed)
    content[rng.randrange(48 if seed < 3 else len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    finish(stopped)


def test_a_journal_with_anything_after_it(stopped):
    with journal(stopped).open("ab") as file:
        file.write(b"\xff" * 1000)
    finish(stopped)


def test_gc_takes_a_journal_only_after_its_grace(stopped):
    path = journal(stopped)
    stopped.gc()
    assert path.exists()
    stopped.gc(grace_s=0)
    assert not path.exists() and not list((stopped.path / "staging").iterdir())
    assert len(finish(stopped)) == 4000
