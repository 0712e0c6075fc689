from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from unirl.policies.chunks import score_in_chunks
from unirl.policies.token_lm import TokenLM
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.trainer.replay import replay_tokens
from unirl.types import Direction, SamplingSettings


class Peak:
    """Scores with a head, and notes how many positions it was given at once."""

    def __init__(self, head: Tensor) -> None:
        self.head = head
        self.positions: list[int] = []

    def __call__(self, start: int, end: int, hidden: Tensor, uncond: Tensor | None) -> tuple[Tensor, Tensor]:
        self.positions.append(hidden.shape[0] * hidden.shape[1])
        logprobs = nn.functional.log_softmax(hidden @ self.head, -1)
        return logprobs[..., 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize(
    ("positions", "expected"), [(0, [21]), (100, [21]), (6, [6, 6, 6, 3]), (1, [3] * 7), (8, [6, 6, 6, 3])]
)
def test_no_more_positions_at_once_than_asked_for(positions: int, expected: list[int]) -> None:
    """Three rows of seven tokens; the backward pass scores every chunk once more."""
    head = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    whole, chunked = Peak(head), Peak(head)
    logprobs, entropy = score_in_chunks(chunked, hidden, None, positions=positions)
    expected_logprobs, expected_entropy = score_in_chunks(whole, hidden, None, positions=0)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=0)
    assert chunked.positions == expected
    weights = torch.randn(3, 7, dtype=torch.float64)
    found = torch.autograd.grad((weights * logprobs + entropy).sum(), (hidden, head))
    wanted = torch.autograd.grad((weights * expected_logprobs + expected_entropy).sum(), (hidden, head))
    for gradient, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-12, rtol=0)
    assert sorted(chunked.positions) == sorted(expected * (1 if len(expected) == 1 else 2))


@pytest.mark.parametrize("direction", get_args(Direction))
@pytest.mark.parametrize(("guidance", "detach"), [(1.0, False), (1.7, False), (1.7, True)])
def test_a_policy_in_chunks_has_the_same_scores_and_gradients(
    toy: SimpleNamespace, direction: Direction, guidance: float, detach: bool
) -> None:
    policy: TokenLM = toy.make_policy(seed=4).double()
    sampling = SamplingSettings(guidance=guidance)
    rollout = NativeEngine(policy).rollout(
        RolloutRequest(
            prompts=toy.make_prompts(direction, 3),
            group_size=2,
            max_new_tokens=4,
            sampling=sampling,
            seeds=[(0, p) for p in range(3)],
        )
    )
    found = []
    for chunk in (0, 6):
        policy.logits_chunk = chunk
        policy.zero_grad()
        output = replay_tokens(policy, policy, rollout, sampling, detach_uncond=detach)
        mask = rollout.response_mask
        (output.logprobs[mask].sum() + 0.3 * output.entropy[mask].square().sum()).backward()
        gradients = {name: p.grad.clone() for name, p in policy.lm.named_parameters()}
        found.append((output.logprobs[mask], output.entropy[mask], gradients))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-10, rtol=0)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-10, rtol=0)
    for name, gradient in found[0][2].items():
        torch.testing.assert_close(found[1][2][name], gradient, atol=1e-9, rtol=0, msg=name)
