from __future__ import annotations

import numpy as np
import pytest
import torch

from unirl.rollout import compared_copies
from unirl.rollout.compared_copies import copy_compared, same_bytes


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_copies, "BLOCK_BYTES", 48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (2, 48)])
def test_every_byte_is_copied(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    drawn = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0))
    source, target = drawn.to(dtype), torch.zeros(shape, dtype=dtype)
    assert copy_compared(target, source)
    assert torch.equal(target, source)
    assert same_bytes(target, source)


def test_a_nan_equals_itself_and_zeros_of_two_signs_differ() -> None:
    source = torch.tensor([float("nan"), 0.0])
    target = torch.empty(2)
    assert copy_compared(target, source)
    assert not same_bytes(target, torch.tensor([float("nan"), -0.0]))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_block_that_does_not_arrive_is_noticed(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it lies; the blocks behind it arrive all the same."""
    source, target = torch.arange(36, dtype=torch.float32) + 1, torch.zeros(36)
    copy, blocks = np.copyto, iter(range(3))

    def copy_but_one(place: object, block: object) -> None:
        if next(blocks) != lost:
            copy(place, block)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr(compared_copies.np, "copyto", copy_but_one)
    assert not copy_compared(target, source)
    assert (target == 0).nonzero().flatten().tolist() == list(range(12 * lost, 12 * lost + 12))


def test_tensors_of_two_sizes_differ() -> None:
    assert not same_bytes(torch.zeros(3), torch.zeros(4))
