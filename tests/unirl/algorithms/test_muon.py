from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from unirl.algorithms.muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 5)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    near = left.T @ orthogonalized(matrix) @ right.T
    large = values > 0.1 * values.max()
    torch.testing.assert_close(near, near.diag().diag(), atol=1e-4, rtol=0)
    assert bool(((near.diag()[large] > 0.6) & (near.diag()[large] < 1.3)).all())


def test_nothing_to_learn_from_gives_no_step() -> None:
    weight, still = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 2))
    weight.grad = torch.zeros(2, 2)
    Muon([weight, still], learning_rate=0.1, weight_decay=0.0).step()
    assert torch.equal(weight, torch.ones(2, 2))
    assert torch.equal(still, torch.ones(2, 2))


def test_steps_are_those_of_torch_up_to_its_bfloat16() -> None:
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(12, 30, generator=generator), torch.randn(4, 12, 30, generator=generator)
    ours, theirs = Parameter(start.clone()), Parameter(start.clone())
    optimizers = (
        Muon([ours], learning_rate=0.1, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs.detach() - start).norm()
    assert (ours - theirs).detach().norm() < 0.02 * moved
