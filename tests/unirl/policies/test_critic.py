from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from unirl.policies.critic import ValueHead


def test_the_first_values_are_zero_whatever_the_seed() -> None:
    hidden = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    for seed in range(3):
        values = ValueHead(16, seed=seed)(hidden)
        assert values.shape == (3, 5) and values.dtype == torch.float32
        assert not values.any()


def test_weights_depend_on_the_seed_alone_and_the_global_stream_is_left_alone() -> None:
    before = torch.get_rng_state()
    first = ValueHead(16, seed=1)
    assert torch.get_rng_state().equal(before)
    torch.rand(1)
    assert ValueHead(16, seed=1).hidden.weight.equal(first.hidden.weight)
    assert not ValueHead(16, seed=2).hidden.weight.equal(first.hidden.weight)


def test_the_value_loss_never_reaches_the_trunk(toy: SimpleNamespace) -> None:
    policy = toy.make_policy()
    with torch.no_grad():
        policy.critic.value.weight.normal_(generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[2, 6, 4, 11, 12, 13, 14]])
    output = policy(ids, torch.ones_like(ids, dtype=torch.bool), prompt_length=3, direction="image")
    (output.values - 1).square().sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.lm.parameters())
    assert all(p.grad is not None and p.grad.any() for p in policy.critic.parameters())


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_critic_of_its_own_learns_with_its_own_trunk(toy: SimpleNamespace, is_asked: bool) -> None:
    """Every parameter of it gets a gradient, of zero where nobody asks; the policy's get none."""
    policy = toy.make_policy()
    policy.take_critic("own")
    with torch.no_grad():
        policy.critic.head.value.weight.normal_(generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 2, 6, 4, 11, 12], [2, 6, 4, 11, 12, 13]])
    mask = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    output = policy(ids, mask, prompt_length=3, direction="image", with_values=is_asked)
    assert output.values.shape == (2, 3) and bool(output.values.any()) == is_asked
    (output.values - 1).square().sum().backward()
    assert all(p.grad is None for p in policy.lm.parameters())
    assert {bool(p.grad.any()) for p in policy.critic_parameters()} == {is_asked}
    assert output.values.isfinite().all()


def test_a_critic_that_is_there_stays(toy: SimpleNamespace) -> None:
    policy = toy.make_policy()
    shared = policy.critic
    policy.take_critic("shared")
    assert policy.critic is shared
    policy.take_critic("own")
    own = policy.critic
    policy.take_critic("own")
    assert policy.critic is own


def test_it_learns_a_value_from_the_hidden_state() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(16, 4, 8, generator=generator)
    returns = hidden[..., 0]
    critic = ValueHead(8)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = (critic(hidden) - returns).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


def test_half_precision_trunks_give_float32_values() -> None:
    assert ValueHead(8)(torch.ones(1, 2, 8, dtype=torch.bfloat16)).dtype == torch.float32
