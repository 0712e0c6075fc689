"""What every policy must keep to, whichever model it is made of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from unirl.policies.token_lm import PolicyOutput, TokenLM
from unirl.rollout.native import NativeEngine, sample_uniforms
from unirl.types import Direction, Rollout

DIRECTIONS = get_args(Direction)


def roll_out(policy: TokenLM, toy: SimpleNamespace, direction: Direction, **options: float) -> Rollout:
    """4 prompts of unequal length, 3 samples each."""
    prompts = toy.make_prompts(direction)
    length = policy.max_response_length(direction, 3)
    uniforms = np.stack([sample_uniforms([11, p], 3, length) for p in range(len(prompts))])
    return NativeEngine(policy).rollout(prompts, uniforms, **options)


def score(policy: TokenLM, rollout: Rollout) -> PolicyOutput:
    return policy(
        rollout.input_ids,
        rollout.attention_mask,
        prompt_length=rollout.prompt_length,
        direction=rollout.prompts[0].direction,
        temperature=rollout.temperature,
    )


class PolicyContract:
    """Inherit it and give a fixture `policy` over the toy vocabulary."""

    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
    def test_the_trainer_scores_samples_as_the_rollout_did(
        self, policy: TokenLM, toy: SimpleNamespace, direction: Direction, temperature: float
    ) -> None:
        rollout = roll_out(policy, toy, direction, temperature=temperature)
        mask = rollout.response_mask
        with torch.no_grad():
            output = score(policy, rollout)
        torch.testing.assert_close(output.logprobs[mask], rollout.old_logprobs[mask], atol=1e-5, rtol=0)
        assert (rollout.old_logprobs[mask] < 0).all()
        assert not rollout.old_logprobs[~mask].any()

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_shapes_and_bounds(self, policy: TokenLM, toy: SimpleNamespace, direction: Direction) -> None:
        rollout = roll_out(policy, toy, direction)
        with torch.no_grad():
            output = score(policy, rollout)
        shape = rollout.response_mask.shape
        for values in (output.logprobs, output.entropy, output.values):
            assert values.shape == shape and values.dtype == torch.float32
        most = float(np.log(int(policy.allowed(direction).sum())))
        assert (output.entropy >= 0).all() and (output.entropy <= most + 1e-5).all()
        assert not output.values.any()

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_left_padding_changes_nothing(
        self, policy: TokenLM, toy: SimpleNamespace, direction: Direction
    ) -> None:
        rollout = roll_out(policy, toy, direction)
        rows = rollout.input_ids.shape[0]
        pad = torch.full((rows, 5), policy.vocabulary.pad)
        with torch.no_grad():
            narrow = score(policy, rollout)
            wide = policy(
                torch.cat([pad, rollout.input_ids], 1),
                torch.cat([torch.zeros_like(pad, dtype=torch.bool), rollout.attention_mask], 1),
                prompt_length=rollout.prompt_length + 5,
                direction=direction,
            )
        mask = rollout.response_mask
        torch.testing.assert_close(wide.logprobs[mask], narrow.logprobs[mask], atol=1e-5, rtol=0)
        torch.testing.assert_close(wide.entropy[mask], narrow.entropy[mask], atol=1e-5, rtol=0)

    def test_train_leaves_dropout_off(self, policy: TokenLM, toy: SimpleNamespace) -> None:
        policy.train()
        assert not any(module.training for module in policy.modules())
        rollout = roll_out(policy, toy, "image")
        with torch.no_grad():
            first, second = score(policy, rollout), score(policy, rollout)
        assert first.logprobs.equal(second.logprobs)

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_save_and_load_give_the_same_policy(
        self, policy: TokenLM, toy: SimpleNamespace, direction: Direction, tmp_path: Path
    ) -> None:
        with torch.no_grad():
            policy.critic.value.bias.fill_(0.25)
        rollout = roll_out(policy, toy, direction)
        policy.save(tmp_path / "policy")
        loaded = TokenLM.load(tmp_path / "policy")
        with torch.no_grad():
            before, after = score(policy, rollout), score(loaded, rollout)
        assert after.logprobs.equal(before.logprobs)
        assert after.values.equal(before.values)
        assert (after.values == 0.25).all()
        again = roll_out(loaded, toy, direction)
        assert again.input_ids.equal(rollout.input_ids)

    def test_transformers_loads_what_was_saved(
        self, policy: TokenLM, toy: SimpleNamespace, tmp_path: Path
    ) -> None:
        policy.save(tmp_path)
        lm = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert type(lm) is type(policy.lm)
        for name, value in policy.lm.state_dict().items():
            assert lm.state_dict()[name].equal(value), name

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_the_grammar_holds_whatever_the_model_prefers(
        self, policy: TokenLM, toy: SimpleNamespace, direction: Direction
    ) -> None:
        """Forbidden ids get the largest logits; 500 random rollouts hold none of them."""
        allowed = policy.allowed(direction)
        boosted = _Boosted(policy.lm.lm_head, forbidden=~allowed)
        policy.lm.lm_head = boosted
        try:
            prompts = toy.make_prompts(direction)
            length = policy.max_response_length(direction, 3)
            uniforms = np.random.default_rng(0).random((len(prompts), 125, length))
            rollout = NativeEngine(policy).rollout(prompts, uniforms)
        finally:
            policy.lm.lm_head = boosted.head
        mask = rollout.response_mask
        assert len(mask) == 500
        assert allowed[rollout.response_ids[mask]].all()
        assert rollout.old_logprobs[mask].isfinite().all()
        ids, ended = rollout.response_ids, rollout.response_ids == policy.vocabulary.eos
        if direction == "image":
            assert mask.all() and not rollout.truncated.any()
            return
        assert (ended & mask).sum(1).le(1).all()
        lengths = mask.sum(1)
        assert mask.equal(torch.arange(length) < lengths[:, None])
        last = ids[torch.arange(500), lengths - 1] == policy.vocabulary.eos
        assert rollout.truncated.equal(~last)
        assert (lengths[rollout.truncated] == length).all()
        assert (ids[~mask] == policy.vocabulary.pad).all()


class _Boosted(torch.nn.Module):
    def __init__(self, head: torch.nn.Module, forbidden: torch.Tensor) -> None:
        super().__init__()
        self.head = head
        self.forbidden = forbidden

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) + 1e4 * self.forbidden
