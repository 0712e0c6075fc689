"""Guidance is part of the policy: one mix in rollout, old, new and reference log-probs and the gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from storage import FeatureStore
from unirl.errors import RolloutError
from unirl.policies.token_lm import TokenLM
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.trainer.replay import replay_tokens
from unirl.types import Rollout, SamplingSettings

GUIDED = SamplingSettings(temperature=0.9, guidance=2.5)


@pytest.fixture(scope="module")
def policy(toy: SimpleNamespace) -> TokenLM:
    return toy.make_policy(seed=2).to(torch.float64)


@pytest.fixture(scope="module")
def rollout(policy: TokenLM, toy: SimpleNamespace) -> Rollout:
    request = RolloutRequest(
        prompts=toy.make_prompts("image", 3),
        group_size=2,
        max_new_tokens=4,
        seeds=[(1, p) for p in range(3)],
        sampling=GUIDED,
    )
    return NativeEngine(policy).rollout(request)


def by_hand(policy: TokenLM, rollout: Rollout, *, detach: bool) -> Tensor:
    """Log-probs (B, T) from two runs of the bare model a row, unpadded, mixed and normalised in place."""
    rows = []
    for row in range(len(rollout.input_ids)):
        prompt = rollout.prompts[row // rollout.group_size]
        response = rollout.response_ids[row]
        branches = []
        for ids in (policy.prompt_ids(prompt), policy.unconditional_ids(prompt)):
            whole = torch.cat([torch.tensor(ids), response])[None]
            branches.append(policy.lm(input_ids=whole).logits[0, len(ids) - 1 : -1])
        cond, uncond = branches[0], branches[1].detach() if detach else branches[1]
        codes = policy.allowed("image")
        scores = (uncond + 2.5 * (cond - uncond))[:, codes] / 0.9
        first = int(codes.nonzero()[0])
        rows.append(scores.log_softmax(-1)[torch.arange(4), response - first])
    return torch.stack(rows)


def gradients(policy: TokenLM, logprobs: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    weights = torch.linspace(-1, 1, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
    (logprobs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in policy.lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("detach", [False, True], ids=["exact", "detach_uncond"])
def test_value_and_gradient_are_those_of_the_mix(policy: TokenLM, rollout: Rollout, detach: bool) -> None:
    scored = replay_tokens(policy, policy, rollout, GUIDED, detach_uncond=detach)
    expected = by_hand(policy, rollout, detach=detach)
    torch.testing.assert_close(scored.logprobs, expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(rollout.old_logprobs.double(), expected.detach(), atol=1e-6, rtol=0)
    mine, other = gradients(policy, scored.logprobs), gradients(policy, expected)
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-9, rtol=1e-6)


def test_the_two_modes_differ_in_the_gradient_alone(policy: TokenLM, rollout: Rollout) -> None:
    exact = replay_tokens(policy, policy, rollout, GUIDED)
    detached = replay_tokens(policy, policy, rollout, GUIDED, detach_uncond=True)
    assert exact.logprobs.equal(detached.logprobs)
    name = "model.embed_tokens.weight"
    assert not gradients(policy, exact.logprobs)[name].equal(gradients(policy, detached.logprobs)[name])


def test_a_guided_rollout_is_not_scored_without_guidance(policy: TokenLM, rollout: Rollout) -> None:
    with pytest.raises(RolloutError, match=r"drawn at guidance 2\.5, replayed at 1;"):
        replay_tokens(policy, policy, rollout, SamplingSettings(temperature=0.9))


@pytest.mark.parametrize("mode", ["exact", "detach_uncond", "unguided"])
def test_a_guided_stage_starts_on_policy_and_on_the_reference(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path, mode: str
) -> None:
    """Whatever is trained, its first step has ratio 1 and no divergence, and evaluations are guided."""
    stage = replace(toy.STAGES[1], steps=2, guidance=2.0, guidance_mode=mode, temperature=0.8)
    trainer = toy.make_trainer(tmp_path, toy_store, stages=[stage])
    seen = []
    rollout = trainer.engine.rollout
    trainer.engine.rollout = lambda request: seen.append(request.sampling) or rollout(request)
    trainer.train()
    first = next(line for line in toy.metrics_of(tmp_path) if line["kind"] == "train")
    assert abs(first["kl/reference"]) < 1e-6
    assert first["rollout/logprob_gap_max"] < 1e-5
    assert first["rollout/ratio"] == pytest.approx(1.0, abs=1e-5)
    trained = SamplingSettings(temperature=0.8, guidance=1.0 if mode == "unguided" else 2.0)
    # The text direction has no stage here, so it is evaluated without guidance.
    assert set(seen) == {trained, SamplingSettings(), SamplingSettings(guidance=2.0)}
