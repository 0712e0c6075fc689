from __future__ import annotations

import os

import numpy as np
import pytest

from storage import row_copy
from storage.row_copy import copy_rows


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(row_copy, "_PIECE_BYTES", 1 << 19)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(3, 64, 64), (16,), ()])
def test_rows_are_copied_by_any_number_of_threads(monkeypatch, threads, shape):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(threads))
    random = np.random.default_rng(threads)
    source = random.integers(0, 255, (300, *shape), np.uint8)
    rows = random.integers(0, 300, (4 << 20) // int(np.prod(shape)))
    out = np.zeros((len(rows), *shape), np.uint8)
    copy_rows(source, rows, out, slice(None))
    np.testing.assert_array_equal(out, source[rows])


@pytest.mark.parametrize("shape", [(3, 64, 64), (256,)])
def test_only_the_given_positions_are_set(shape):
    random = np.random.default_rng(0)
    source = random.integers(1, 255, (300, *shape), np.uint8)
    num_rows = (8 << 20) // int(np.prod(shape))
    out = np.zeros((num_rows, *shape), np.uint8)
    positions = random.permutation(num_rows)[: num_rows // 2]
    rows = random.integers(0, 300, len(positions))
    copy_rows(source, rows, out, positions)
    np.testing.assert_array_equal(out[positions], source[rows])
    out[positions] = 0
    assert not out.any()


def test_a_forked_child_has_threads_of_its_own():
    source = np.arange(4 << 20, dtype=np.uint8).reshape(4, -1)
    rows = np.array([3, 1, 2, 0])
    out = np.empty_like(source)
    copy_rows(source, rows, out, slice(None))
    child = os.fork()
    if child == 0:
        out[:] = 0
        copy_rows(source, rows, out, slice(None))
        os._exit(0 if (out == source[rows]).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
