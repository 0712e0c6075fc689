from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from unirl.algorithms import mean_metrics, token_logprobs
from unirl.errors import RolloutError
from unirl.policies.token_lm import TokenLM
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.trainer.mismatch import (
    effective_fraction,
    likely_cause,
    mismatch_metrics,
    old_logprobs_and_weights,
    require_agreement,
)
from unirl.trainer.replay import replay_tokens
from unirl.trainer.stages import Stage
from unirl.types import Experience, Rollout, Scores

STAGE = Stage(name="s", direction="image", prompts="true", steps=1, temperature=0.7)


@pytest.fixture(scope="module")
def policy(toy: SimpleNamespace) -> TokenLM:
    return toy.make_policy(seed=2)


@pytest.fixture(scope="module")
def reference(toy: SimpleNamespace) -> TokenLM:
    return toy.make_policy(seed=3)


def roll_out(policy: TokenLM, toy: SimpleNamespace, stage: Stage = STAGE) -> Rollout:
    return NativeEngine(policy).rollout(
        RolloutRequest(
            prompts=toy.make_prompts("image", 2),
            group_size=2,
            max_new_tokens=4,
            seeds=[(1, 0), (1, 1)],
            sampling=stage.sampling,
        )
    )


@pytest.fixture(scope="module")
def rollout(policy: TokenLM, toy: SimpleNamespace) -> Rollout:
    return roll_out(policy, toy)


def shifted(rollout: Rollout, shift: Tensor) -> Rollout:
    """An engine that claims other log-probs: the trainer's less `shift`."""
    return replace(rollout, old_logprobs=rollout.old_logprobs - shift)


SHIFT = torch.tensor([[0.0, 0.5, -0.5, 3.0], [0.0] * 4, [0.1] * 4, [-1.0, 1.0, 0.0, 0.0]])


def weighed(policy: TokenLM, rollout: Rollout, stage: Stage) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad():
        output = replay_tokens(policy, policy, rollout, stage.sampling)
    return old_logprobs_and_weights(output, rollout, rollout.response_mask, stage)


def test_without_a_correction_the_engine_is_believed(policy: TokenLM, rollout: Rollout) -> None:
    old, weights = weighed(policy, shifted(rollout, SHIFT), STAGE)
    assert old.equal(rollout.old_logprobs - SHIFT) and weights is None


def test_token_weights_are_the_ratio_cut_at_the_limit(policy: TokenLM, rollout: Rollout) -> None:
    stage = replace(STAGE, importance="token", importance_limit=2.0)
    old, weights = weighed(policy, shifted(rollout, SHIFT), stage)
    torch.testing.assert_close(old, rollout.old_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(weights, SHIFT.exp().clamp(max=2.0), atol=1e-4, rtol=0)


def test_sequence_weights_multiply_over_the_response(policy: TokenLM, rollout: Rollout) -> None:
    stage = replace(STAGE, importance="sequence", importance_limit=2.0)
    _, weights = weighed(policy, shifted(rollout, SHIFT), stage)
    expected = SHIFT.sum(1, keepdim=True).exp().clamp(max=2.0).expand(4, 4)
    torch.testing.assert_close(weights, expected, atol=1e-4, rtol=0)


def test_far_off_tokens_and_responses_can_be_masked(policy: TokenLM, rollout: Rollout) -> None:
    stage = replace(STAGE, importance="token", importance_mask=2.0)
    _, weights = weighed(policy, shifted(rollout, SHIFT), stage)
    assert (weights == 0).equal(SHIFT.abs() > math.log(2.0))
    _, weights = weighed(policy, shifted(rollout, SHIFT), replace(stage, importance="sequence"))
    assert (weights == 0).any(1).tolist() == [True, False, False, False]


def test_gauges_say_how_much_of_the_batch_is_left(policy: TokenLM, rollout: Rollout) -> None:
    stage = replace(STAGE, importance="token", importance_limit=2.0, importance_mask=10.0)
    moved = shifted(rollout, SHIFT)
    with torch.no_grad():
        output = replay_tokens(policy, policy, moved, stage.sampling)
    old, weights = old_logprobs_and_weights(output, moved, moved.response_mask, stage)
    zeros = torch.zeros(4, 4)
    experience = Experience(
        rollout=moved,
        scores=Scores(total=torch.zeros(4).numpy()),
        old_logprobs=old,
        importance=weights,
        ref_logprobs=old,
        old_values=zeros,
        loss_mask=moved.response_mask,
        advantages=zeros,
        returns=zeros,
    )
    metrics = mean_metrics(mismatch_metrics(experience, output, stage))
    ratios = SHIFT.exp()
    assert metrics["rollout/ratio"] == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert metrics["rollout/ratio_max"] == pytest.approx(float(ratios.max()), rel=1e-4)
    assert metrics["rollout/logprob_gap"] == pytest.approx(float(SHIFT.abs().mean()), rel=1e-4)
    assert metrics["importance/masked_fraction"] == 1 / 16
    assert metrics["importance/truncated_fraction"] == 1 / 16
    kept = torch.where(math.log(10.0) < SHIFT, 0.0, ratios.clamp(max=2.0))
    expected = float(kept.sum() ** 2 / (16 * kept.square().sum()))
    assert effective_fraction(metrics) == pytest.approx(expected, rel=1e-4)


def test_equal_weights_are_worth_all_tokens() -> None:
    assert effective_fraction({"importance/weight": 1.0, "importance/weight_squared": 1.0}) == 1.0
    assert effective_fraction({"importance/weight": 0.5, "importance/weight_squared": 0.5}) == 0.5
    assert effective_fraction({"importance/weight": 0.0, "importance/weight_squared": 0.0}) == 0.0


def test_a_token_outside_the_grammar_stops_the_run(policy: TokenLM, rollout: Rollout) -> None:
    """An engine without the policy's allowed ids: a word in the middle of a picture."""
    ids = rollout.input_ids.clone()
    ids[2, rollout.prompt_length + 1] = policy.vocabulary.words("dark")[0]
    with pytest.raises(
        RolloutError, match=r"p1, row 2, token 1: id \d+ was sampled where the grammar of 'image'"
    ):
        weighed(policy, replace(rollout, input_ids=ids), STAGE)


def _logprobs(policy: TokenLM, rollout: Rollout, temperature: float, grammar: bool) -> Tensor:
    with torch.no_grad():
        positions = (rollout.attention_mask.long().cumsum(1) - 1).clamp(min=0)
        logits = policy.lm(
            input_ids=rollout.input_ids, attention_mask=rollout.attention_mask.long(), position_ids=positions
        ).logits[:, rollout.prompt_length - 1 : -1]
    allowed = policy.allowed("image") if grammar else None
    return token_logprobs(logits, rollout.response_ids, allowed=allowed, temperature=temperature)[0]


LIES: dict[str, Callable[[TokenLM, TokenLM, Rollout], Tensor]] = {
    "log-probs are those at temperature 1": lambda policy, _, r: _logprobs(policy, r, 1.0, True),
    "raw, before grammar and temperature": lambda policy, _, r: _logprobs(policy, r, 1.0, False),
    "those of all ids, without the grammar": lambda policy, _, r: _logprobs(policy, r, 0.7, False),
    "the reference's weights: it was not synced": lambda _, reference, r: _logprobs(reference, r, 0.7, True),
}


@pytest.mark.parametrize("cause", LIES)
def test_the_likely_cause_is_named(policy: TokenLM, reference: TokenLM, rollout: Rollout, cause: str) -> None:
    lying = replace(rollout, old_logprobs=LIES[cause](policy, reference, rollout))
    assert cause in likely_cause(policy, reference, lying, STAGE)


def test_missing_guidance_is_named(policy: TokenLM, reference: TokenLM, toy: SimpleNamespace) -> None:
    stage = replace(STAGE, guidance=3.0)
    rollout = roll_out(policy, toy, stage)
    lying = replace(rollout, old_logprobs=_logprobs(policy, rollout, 0.7, True))
    assert "samples without guidance" in likely_cause(policy, reference, lying, stage)


def test_an_unknown_cause_is_not_guessed(policy: TokenLM, reference: TokenLM, rollout: Rollout) -> None:
    assert "does not explain it" in likely_cause(policy, reference, shifted(rollout, SHIFT), STAGE)


def test_noise_in_the_trainer_is_named(
    policy: TokenLM, reference: TokenLM, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, generator = policy.backbone, torch.Generator().manual_seed(0)

    def noisy(*arguments: object, **options: object) -> Tensor:
        hidden = backbone(*arguments, **options)
        return hidden + 0.1 * torch.randn(hidden.shape, generator=generator)

    monkeypatch.setattr(policy, "backbone", noisy)
    assert "dropout or other noise is on" in likely_cause(policy, reference, rollout, STAGE)


def sums(gap: float, divergence: float) -> dict[str, Tensor]:
    values = {"rollout/tokens": 2.0, "rollout/logprob_gap_max": gap, "rollout/logprob_gap_sum": gap}
    values |= {"rollout/ratio_sum": 2.5, "rollout/ratio_max": 1.5}
    values |= {"kl/tokens": 2.0, "kl/reference_sum": 2 * divergence}
    return {name: torch.tensor(value) for name, value in values.items()}


def check(gap: float, divergence: float, *, is_start: bool) -> None:
    require_agreement(
        sums(gap, divergence), place="stage s", allowed=1e-3, is_start=is_start, cause=lambda: "the cat"
    )


def test_the_first_step_is_refused_above_the_tolerance() -> None:
    check(9e-4, 0.0, is_start=True)
    check(0.0, 5.0, is_start=False)
    with pytest.raises(
        RolloutError,
        match=r"differ by 0\.5 nats.*mean 0\.25; ratio 1\.25 on average, 1\.5 at most\); the cat",
    ):
        check(0.5, 0.0, is_start=False)
    with pytest.raises(RolloutError, match="differ by nan nats"):
        check(math.nan, 0.0, is_start=False)
    with pytest.raises(
        RolloutError, match=r"policy and reference are the same weights but differ by -5 nats"
    ):
        check(0.0, -5.0, is_start=True)
