"""Lent memory stays with whoever can reach it, and is used again after that."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from datapipe.ring import BufferRing


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    ring = BufferRing(num_kept=2)
    array = ring.lend((4, 3), np.float32)
    address = array.ctypes.data
    assert (array.shape, array.dtype, array.flags.writeable) == ((4, 3), np.float32, True)
    assert (ring.num_lent, ring.num_free) == (1, 0)
    del array
    assert (ring.num_lent, ring.num_free) == (0, 1)
    assert ring.lend((4, 3), np.float32).ctypes.data == address


@pytest.mark.parametrize(
    "derive",
    [
        lambda array: array[1:],
        lambda array: array[1:].reshape(-1)[:2],
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[2],
        lambda array: torch.from_numpy(array).permute(1, 0)[1].numpy(),
        lambda array: torch.from_numpy(array).detach().view(-1)[3:],
        lambda array: memoryview(array),
        lambda array: torch.utils.dlpack.from_dlpack(torch.from_numpy(array)),
        lambda array: {"kept": [torch.from_numpy(array)[:1]]},
        lambda array: torch.from_numpy(array).untyped_storage(),
    ],
)
def test_whatever_can_reach_the_memory_keeps_it(derive: object) -> None:
    ring = BufferRing(num_kept=2)
    kept = derive(ring.lend((4, 3), np.float32))  # type: ignore[operator]
    gc.collect()
    assert (ring.num_lent, ring.num_free) == (1, 0)
    others = [ring.lend((4, 3), np.float32) for _ in range(3)]
    assert ring.num_lent == 4
    del kept
    assert ring.num_free == 1
    assert len(others) == 3


def test_the_memory_used_last_is_lent_first() -> None:
    ring = BufferRing(num_kept=4)
    lent = [ring.lend((100,), np.uint8) for _ in range(3)]
    addresses = [array.ctypes.data for array in lent]
    while lent:
        del lent[0]
    assert ring.lend((100,), np.uint8).ctypes.data == addresses[-1]


def test_free_memory_is_bounded_and_of_a_fitting_size() -> None:
    ring = BufferRing(num_kept=2)
    lent = [ring.lend((1000,), np.uint8) for _ in range(5)]
    del lent
    assert ring.num_free == 2
    large = ring.lend((10_000,), np.uint8)
    assert ring.num_free == 1  # made room for it
    del large
    assert ring.num_free == 2
    small = ring.lend((900,), np.uint8)
    assert ring.num_free == 1 and len(small) == 900
    ring.clear()
    assert ring.num_free == 0


def test_nothing_is_lent_for_no_rows() -> None:
    ring = BufferRing(num_kept=1)
    assert ring.lend((0, 3), np.int16).shape == (0, 3) and ring.num_lent == 0
