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
