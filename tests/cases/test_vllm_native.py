"""Field cases of engines, held by the native one."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unirl.algorithms import policy_loss, sample_tokens, token_logprobs
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.generic_decoder import GenericDecoder
from unirl.rollout.native import NativeEngine
from unirl.trainer.replay import replay_tokens
from unirl.types import Direction, SamplingSettings

TOY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "toy.py")))
COND = torch.tensor([[math.log(4.0), math.log(2.0), 0.0, 0.0]])
UNCOND = torch.tensor([[0.0, math.log(2.0), 0.0, math.log(2.0)]])


def test_vllm_10_guidance_is_one_mix_on_both_sides() -> None:
    """Table model, scale 3: weights (c / u)^3 u, that is 64, 2, 1 and 1/4; the ratio at step 0 is 1."""
    weights = [64.0, 2.0, 1.0, 0.25]
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    guided = {"guidance": 3.0}
    ids, old = sample_tokens(COND.expand(4000, 4), uniforms=grid, uncond=UNCOND.expand(4000, 4), **guided)
    shares = (torch.bincount(ids, minlength=4) / 4000).tolist()
    assert shares == pytest.approx([w / sum(weights) for w in weights], abs=1 / 4000)
    new, _ = token_logprobs(COND.expand(1, 4000, 4), ids[None], uncond=UNCOND.expand(1, 4000, 4), **guided)
    ones = torch.ones_like(new)
    _, metrics = policy_loss(
        new, old[None], ones, ones.bool(), clip_low=0.2, clip_high=0.2, denominator=4000.0
    )
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    unguided, _ = token_logprobs(COND.expand(1, 4000, 4), ids[None])
    assert float((unguided - old).abs().max()) > 0.5


@pytest.mark.parametrize("direction", ["text", "image"])
def test_vllm_10_a_guided_rollout_replays_with_ratio_one(direction: Direction) -> None:
    policy, sampling = TOY.make_policy(seed=1), SamplingSettings(temperature=0.8, guidance=3.0)
    rollout = NativeEngine(policy).rollout(
        RolloutRequest(
            prompts=TOY.make_prompts(direction, 4),
            group_size=3,
            max_new_tokens=4,
            seeds=[(0, p) for p in range(4)],
            sampling=sampling,
        )
    )
    with torch.no_grad():
        new = replay_tokens(policy, policy, rollout, sampling).logprobs
    ratio = (new - rollout.old_logprobs)[rollout.response_mask].exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("direction", ["text", "image"])
def test_vllm_08_boosted_ids_of_the_other_kind_are_never_drawn(direction: Direction, guidance: float) -> None:
    """Placeholder and image ids are pushed by a thousand while text is written, words in a picture."""
    policy = TOY.make_policy(seed=1)
    vocabulary, allowed = policy.vocabulary, policy.allowed(direction)
    with torch.no_grad():
        head = policy.lm.lm_head
        boosted = torch.nn.Linear(head.in_features, head.out_features)
        boosted.weight.copy_(head.weight)
        boosted.bias.copy_(torch.where(allowed, 0.0, 1000.0))
    policy.lm.lm_head = boosted
    sampling = SamplingSettings(guidance=guidance)
    engine = NativeEngine(policy, decoder=GenericDecoder(policy))
    rollout = engine.rollout(
        RolloutRequest(
            prompts=TOY.make_prompts(direction, 4),
            group_size=8,
            max_new_tokens=4,
            seeds=[(0, p) for p in range(4)],
            sampling=sampling,
        )
    )
    drawn = rollout.response_ids[rollout.response_mask]
    assert allowed[drawn].all()
    assert not allowed[[vocabulary.pad, vocabulary.begin_image, vocabulary.end_image]].any()
    assert rollout.old_logprobs.isfinite().all()
    if direction == "image":
        assert (rollout.lengths == TOY.LENGTH).all()
