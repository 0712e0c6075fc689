"""What must hold for every loss: order, padding, micro-batches and masked values change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.algorithms import (
    add_metrics,
    drpo_loss,
    gspo_loss,
    kl_loss,
    mean_metrics,
    policy_loss,
    sequence_mean_weights,
    value_loss,
)
from unirl.errors import ConfigError, ShapeError

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, dict[str, Tensor]]]


def ppo(x: Tensor, old: Tensor, a: Tensor, mask: Tensor, n: float) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_loss(x, old, a, mask, clip_low=0.2, clip_high=0.3, denominator=n, dual_clip=3.0)


def weighted_ppo(
    x: Tensor, old: Tensor, a: Tensor, mask: Tensor, n: float
) -> tuple[Tensor, dict[str, Tensor]]:
    weights = sequence_mean_weights(mask)
    return policy_loss(x, old, a, mask, clip_low=0.2, clip_high=0.2, denominator=n, weights_BT=weights)


def gspo(x: Tensor, old: Tensor, a: Tensor, mask: Tensor, n: float) -> tuple[Tensor, dict[str, Tensor]]:
    return gspo_loss(x, old, a, mask, clip_low=0.1, clip_high=0.1, denominator=n)


def drpo(x: Tensor, old: Tensor, a: Tensor, mask: Tensor, n: float) -> tuple[Tensor, dict[str, Tensor]]:
    return drpo_loss(x, old, a, mask, epsilon=0.1, denominator=n)


def value(x: Tensor, old: Tensor, a: Tensor, mask: Tensor, n: float) -> tuple[Tensor, dict[str, Tensor]]:
    return value_loss(x, old, a, mask, clip=0.2, denominator=n)


def kl(x: Tensor, old: Tensor, a: Tensor, mask: Tensor, n: float) -> tuple[Tensor, dict[str, Tensor]]:
    return kl_loss(x, old, mask, estimator="k3", denominator=n)


LOSSES: list[Loss] = [ppo, weighted_ppo, gspo, drpo, value, kl]
each_loss = pytest.mark.parametrize("loss", LOSSES)


def random_batch(seed: int, rows: int = 6, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -2 * torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    old = logprobs + 0.5 * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    mask[0] = False
    return logprobs, old, advantages, mask


def evaluate(
    loss: Loss, batch: tuple[Tensor, ...], denominator: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x, old, advantages, mask = batch
    x = x.clone().requires_grad_()
    result, metrics = loss(x, old, advantages, mask, denominator)
    result.backward()
    assert x.grad is not None
    return result.detach(), x.grad, metrics


def assert_same_metrics(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert mean_metrics(left) == pytest.approx(mean_metrics(right), abs=1e-10, nan_ok=True)


@each_loss
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
def test_micro_batches_add_up_to_one_batch(loss: Loss, seed: int, cut: int) -> None:
    """The first row is fully masked, so that with cut = 1 one micro-batch has no valid token."""
    batch = random_batch(seed)
    denominator = float(max(int(batch[3].sum()), 1))
    whole = evaluate(loss, batch, denominator)
    parts = [
        evaluate(loss, tuple(x[rows] for x in batch), denominator) for rows in (slice(cut), slice(cut, 6))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), whole[1], atol=1e-10, rtol=0)
    assert_same_metrics(add_metrics([p[2] for p in parts]), whole[2])


@each_loss
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), left=st.integers(0, 3), right=st.integers(0, 3))
def test_order_and_padding_do_not_matter(loss: Loss, seed: int, left: int, right: int) -> None:
    batch = random_batch(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    padded = tuple(torch.nn.functional.pad(x[order], (left, right)) for x in batch)
    plain, moved = evaluate(loss, batch, 7.0), evaluate(loss, padded, 7.0)
    torch.testing.assert_close(moved[0], plain[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(moved[1][:, left : left + 5], plain[1][order], atol=1e-10, rtol=0)
    assert_same_metrics(moved[2], plain[2])


@each_loss
@pytest.mark.parametrize("stray", [torch.nan, -torch.inf, torch.inf, 1e30])
def test_values_under_the_mask_are_ignored(loss: Loss, stray: float) -> None:
    batch = random_batch(1)
    mask = batch[3]
    dirty = (*(torch.where(mask, x, stray) for x in batch[:3]), mask)
    clean_result, dirty_result = evaluate(loss, batch, 7.0), evaluate(loss, dirty, 7.0)
    assert dirty_result[0].equal(clean_result[0])
    assert dirty_result[1].equal(clean_result[1])
    assert_same_metrics(dirty_result[2], clean_result[2])


@each_loss
def test_nothing_valid_gives_zero_and_a_zero_gradient(loss: Loss) -> None:
    x, old, advantages, mask = random_batch(2)
    result, gradient, metrics = evaluate(loss, (x, old, advantages, torch.zeros_like(mask)), 7.0)
    assert result == 0 and not gradient.any()
    assert all(not torch.isnan(metric) for metric in metrics.values())


@each_loss
def test_the_denominator_may_be_a_tensor(loss: Loss) -> None:
    x, old, advantages, mask = random_batch(3)
    assert loss(x, old, advantages, mask, torch.tensor(7.0))[0] == loss(x, old, advantages, mask, 7.0)[0]


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss is not gspo])
def test_gradients_are_those_of_finite_differences(loss: Loss) -> None:
    """GSPO's gradient is on purpose not that of its value; test_peer_values holds it to the peers'."""
    x, old, advantages, mask = random_batch(4)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda y: loss(y, old, advantages, mask, 7.0)[0], (x,))


@each_loss
def test_only_the_trained_model_gets_a_gradient(loss: Loss) -> None:
    x, old, advantages, mask = random_batch(5)
    for tensor in (x, old, advantages):
        tensor.requires_grad_()
    loss(x, old, advantages, mask, 7.0)[0].backward()
    assert x.grad is not None and old.grad is None and advantages.grad is None


@each_loss
def test_refusals(loss: Loss) -> None:
    x, old, advantages, mask = random_batch(6)
    with pytest.raises(ShapeError, match=r"\(6, 5\).*\(6, 4\)"):
        loss(x, old[:, :4], advantages, mask, 7.0)
    with pytest.raises(ShapeError, match=r"torch\.bool"):
        loss(x, old, advantages, mask.float(), 7.0)
    for denominator in (0.0, -1.0, torch.nan):
        with pytest.raises(ConfigError, match="denominator"):
            loss(x, old, advantages, mask, denominator)
