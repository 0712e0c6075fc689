"""What a forward pass can leave out without changing what is learned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from unirl.rollout.engine import RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.trainer.replay import replay_tokens
from unirl.types import Direction, SamplingSettings


@pytest.mark.parametrize("direction", ["text", "image"])
def test_without_critic_and_entropy_the_policys_gradient_is_the_same(
    toy: SimpleNamespace, direction: Direction
) -> None:
    policy = toy.make_policy(seed=1)
    request = RolloutRequest(
        prompts=toy.make_prompts(direction),
        group_size=2,
        max_new_tokens=policy.max_response_length(direction, 3),
        seeds=[(0, p) for p in range(4)],
    )
    rollout = NativeEngine(policy).rollout(request)
    found = []
    for whole in (True, False):
        policy.zero_grad(set_to_none=True)
        output = replay_tokens(
            policy, policy, rollout, SamplingSettings(), entropy_gradient=whole, with_values=whole
        )
        # A log-prob off the mask can be -inf, where the grammar does not allow the padding.
        loss = torch.where(rollout.response_mask, output.logprobs, 0.0).sum() + 0.0 * output.values.sum()
        loss.backward()
        found.append([output.logprobs, output.entropy, *(p.grad for p in policy.trained_parameters())])
        assert all(not p.grad.any() for p in policy.critic.parameters())
        assert output.values.shape == rollout.response_mask.shape
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("direction", ["text", "image"])
def test_ids_outside_of_the_allowed_span_are_left_out_and_change_nothing(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """A response of any id: those that are not allowed have no probability."""
    policy = toy.make_policy(seed=1).double()
    generator = torch.Generator().manual_seed(0)
    length = policy.max_response_length(direction, 3)
    ids = torch.randint(0, policy.vocabulary.size, (6, 2 + length), generator=generator)
    span, num_ids = policy.id_span(direction), policy.vocabulary.size
    assert 0 < span.stop - span.start < num_ids
    found = []
    for used in (slice(0, num_ids), span):
        monkeypatch.setattr(type(policy), "id_span", lambda *_, used=used: used)
        policy.zero_grad(set_to_none=True)
        output = policy(ids, torch.ones_like(ids).bool(), prompt_length=2, direction=direction)
        torch.where(output.logprobs.isneginf(), 0.0, output.logprobs).sum().backward()
        found.append([output.logprobs, output.entropy, *(p.grad for p in policy.trained_parameters())])
    assert found[0][0].isneginf().any() and not found[0][0].isneginf().all()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
