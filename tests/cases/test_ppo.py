"""Field cases of PPO, by their rows in the case list."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from unirl.algorithms import (
    gae,
    group_advantages,
    informative_groups,
    kl_k3,
    kl_penalty_rewards,
    last_valid_index,
    policy_loss,
    rloo_advantages,
    sample_tokens,
    token_logprobs,
)
from unirl.errors import ConfigError, RolloutError
from unirl.policies.reference import reference_of
from unirl.policies.token_lm import PolicyConfig, TokenLM
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.trainer.replay import replay_tokens
from unirl.trainer.stage_checks import check_stages
from unirl.trainer.stages import RunSettings, Stage
from unirl.types import Direction, Prompt, Rollout

TOY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "toy.py")))

TABLE = torch.tensor([[math.log(4.0), math.log(2.0), 0.0, 0.0]])
"""A policy of one position and four ids with weights 4, 2, 1, 1."""


def weights_at(temperature: float) -> list[float]:
    weights = [w ** (1 / temperature) for w in (4.0, 2.0, 1.0, 1.0)]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_ppo_02_one_distribution_for_rollout_and_update(temperature: float) -> None:
    """Log-probs, entropy and draws are those of the tempered policy, and rollout equals update exactly."""
    probs = weights_at(temperature)
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    ids, rollout_logprobs = sample_tokens(TABLE.expand(4000, 4), uniforms=grid, temperature=temperature)
    shares = torch.bincount(ids, minlength=4) / 4000
    assert shares.tolist() == pytest.approx(probs, abs=1 / 4000)
    logprobs, entropy = token_logprobs(TABLE.expand(1, 4000, 4), ids.unsqueeze(0), temperature=temperature)
    assert logprobs[0].equal(rollout_logprobs)
    assert logprobs[0, 0].item() == pytest.approx(math.log(probs[0]), abs=1e-6)
    assert entropy[0, 0].item() == pytest.approx(-sum(p * math.log(p) for p in probs), abs=1e-6)
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    _, metrics = policy_loss(
        logprobs,
        rollout_logprobs.unsqueeze(0),
        torch.ones_like(logprobs),
        mask,
        clip_low=0.2,
        clip_high=0.2,
        denominator=4000.0,
    )
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/kl_old_sum"] == 0.0


def test_ppo_02_temperature_zero_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match=r"temperature is 0\.0.*no policy gradient.*argmax"):
        sample_tokens(TABLE, uniforms=torch.tensor([0.5]), temperature=0.0)
    with pytest.raises(ConfigError, match=r"temperature is 0\.0"):
        token_logprobs(TABLE.unsqueeze(0), torch.tensor([[0]]), temperature=0.0)


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.05)])
def test_ppo_02_settings_that_cut_ids_off_are_refused_with_a_reason(name: str, value: float) -> None:
    stage = Stage(name="s", direction="text", prompts="true", steps=1, prompts_per_step=8)
    with pytest.raises(
        ConfigError, match=rf"stage s: {name} is {value:g}; only .* the set of ids that may be"
    ):
        check_stages([replace(stage, **{name: value})], RunSettings(), world_size=1)


def roll_out(policy: TokenLM, stage: Stage, prompts: list[Prompt]) -> Rollout:
    return NativeEngine(policy).rollout(
        RolloutRequest(
            prompts=prompts,
            group_size=4,
            max_new_tokens=4,
            seeds=[(0, p) for p in range(len(prompts))],
            sampling=stage.sampling,
        )
    )


@pytest.mark.parametrize("direction", ["text", "image"])
def test_ppo_01_equal_weights_have_ratio_one_and_no_divergence(direction: Direction) -> None:
    """Prompts of unequal length, ends in the middle, and the end token as padding."""
    policy = TOY.make_policy(seed=1)
    policy.vocabulary.pad = policy.vocabulary.eos
    stage = Stage(name="s", direction=direction, prompts="true", steps=1, temperature=1.3)
    rollout = roll_out(policy, stage, TOY.make_prompts(direction, 6))
    mask, reference = rollout.response_mask, reference_of(policy)
    assert (
        rollout.prompt_length > int(rollout.attention_mask[0, : rollout.prompt_length].sum())
        or direction == "text"
    )
    if direction == "text":
        assert len(set(rollout.lengths.tolist())) > 1
    with torch.no_grad():
        new, ref = (replay_tokens(m, policy, rollout, stage.sampling).logprobs for m in (policy, reference))
    assert float((new - rollout.old_logprobs)[mask].abs().max()) < 1e-5
    assert float((rollout.old_logprobs - ref)[mask].abs().max()) < 1e-5
    assert (kl_k3(rollout.old_logprobs[mask], ref[mask]) >= 0).all()


def cut_off(policy: TokenLM, rollout: Rollout) -> Tensor:
    """Log-probs of an engine that draws among the three likeliest ids alone."""
    ids, mask = rollout.input_ids, rollout.attention_mask
    with torch.no_grad():
        logits = policy.lm(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
        ).logits[:, rollout.prompt_length - 1 : -1]
    allowed = logits.masked_fill(~policy.allowed(rollout.direction), -math.inf)
    kept = allowed >= allowed.topk(3).values[..., -1:]
    own = torch.nn.functional.one_hot(rollout.response_ids, logits.shape[-1]).bool()
    scores = allowed.masked_fill(~(kept | own), -math.inf).log_softmax(-1)
    return scores.gather(-1, rollout.response_ids[..., None])[..., 0]


def right_padded(policy: TokenLM, rollout: Rollout) -> Tensor:
    """Log-probs of an engine that pads prompts on the right and reads on behind the padding."""
    length = rollout.prompt_length
    padding = torch.full((len(rollout.input_ids), 1), policy.vocabulary.pad)
    ids = torch.cat([rollout.input_ids[:, :length], padding, rollout.response_ids], dim=1)
    with torch.no_grad():
        logits = policy.lm(input_ids=ids).logits[:, length:-1]
    return token_logprobs(logits, rollout.response_ids, allowed=policy.allowed(rollout.direction))[0]


@pytest.mark.parametrize("engine_logprobs", [cut_off, right_padded])
def test_ppo_01_an_engine_with_other_settings_stops_the_first_step(
    engine_logprobs: Callable[[TokenLM, Rollout], Tensor], tmp_path: Path
) -> None:
    class Deviating(NativeEngine):
        def rollout(self, request: RolloutRequest) -> Rollout:
            rollout = super().rollout(request)
            return replace(
                rollout, old_logprobs=engine_logprobs(self.policy, rollout) * rollout.response_mask
            )

    store = TOY.make_store(tmp_path / "store")
    policy = TOY.make_policy(seed=1)
    trainer = TOY.make_trainer(
        tmp_path / "run", store, policy=policy, stages=TOY.STAGES[1:], engine=Deviating(policy)
    )
    with pytest.raises(RolloutError, match=r"stage image, first step: rollout and trainer differ by .*ratio"):
        trainer.train()


def test_ppo_05_dropout_of_the_configuration_is_off_everywhere(tmp_path: Path) -> None:
    """Attention dropout 0.1, and training mode asked for: two runs agree, and the first step has ratio 1."""
    config = replace_in_llama(attention_dropout=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = TokenLM(LlamaForCausalLM(config), TOY.make_vocabulary())
    assert all(layer.self_attn.attention_dropout == 0.0 for layer in policy.lm.model.layers)
    policy.train()
    policy.lm.train()
    stage = Stage(name="s", direction="image", prompts="true", steps=1)
    rollout = roll_out(policy, stage, TOY.make_prompts("image", 4))
    reference = reference_of(policy)
    runs = [replay_tokens(m, policy, rollout, stage.sampling) for m in (policy, policy, reference)]
    assert runs[0].logprobs.equal(runs[1].logprobs) and runs[0].values.equal(runs[1].values)
    torch.testing.assert_close(runs[2].logprobs, runs[0].logprobs, atol=1e-6, rtol=0)
    torch.testing.assert_close(runs[0].logprobs, rollout.old_logprobs, atol=1e-5, rtol=0)
    trainer = TOY.make_trainer(
        tmp_path / "run", TOY.make_store(tmp_path / "store"), policy=policy, stages=TOY.STAGES[1:]
    )
    trainer.train()
    first = next(line for line in TOY.metrics_of(tmp_path / "run") if line["kind"] == "train")
    assert first["rollout/ratio_max"] == pytest.approx(1.0, abs=1e-5)


def replace_in_llama(**fields: float) -> LlamaConfig:
    sizes = {"width": 32, "num_layers": 2, "num_heads": 2, "mlp_width": 64, "max_length": 64}
    config = PolicyConfig(**sizes).llama(TOY.make_vocabulary())
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def test_ppo_07_groups_never_blow_up() -> None:
    """One success of four, one better of eight: bounded by (n - 1) / sqrt(n), the same in float32 and 64."""
    for rewards in ([1.0, 0.0, 0.0, 0.0], [0.35] * 7 + [0.95]):
        n = len(rewards)
        for dtype in (torch.float32, torch.float64):
            advantages = group_advantages(torch.tensor([rewards], dtype=dtype))
            assert advantages.abs().max().item() <= (n - 1) / math.sqrt(n)
            assert advantages.sum().item() == pytest.approx(0.0, abs=1e-5)
        assert informative_groups(torch.tensor([rewards])).tolist() == [True]


@pytest.mark.parametrize("value", [0.0, 0.35, 0.1, 1e-9, -7.3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ppo_07_equal_rewards_teach_nothing(value: float, dtype: torch.dtype) -> None:
    """Also when the rewards differ by the rounding of the sums that made them."""
    equal = torch.full((1, 8), value, dtype=dtype)
    rounded = equal.clone()
    rounded[0, ::2] = torch.nextafter(equal[0, ::2].float(), torch.tensor(math.inf)).to(dtype)
    for rewards in (equal, rounded) if value else (equal,):
        assert not group_advantages(rewards).any()
        assert not rloo_advantages(rewards).any()
        assert informative_groups(rewards).tolist() == [False]


def test_ppo_07_a_group_of_one_teaches_nothing() -> None:
    for rewards in (torch.tensor([[0.5]]), torch.tensor([[0.5, math.nan, math.nan]])):
        assert not group_advantages(rewards).any()
        assert not rloo_advantages(rewards).any()


PAD, EOS, EOI = 0, 2, 4


@pytest.mark.parametrize(
    ("ids", "mask", "position"),
    [
        ([5, 6, 7, 8], [1, 1, 1, 1], 3),  # cut at full length
        ([5, EOS, PAD, PAD], [1, 1, 0, 0], 1),  # ends in the middle
        ([5, 6, 7, EOS], [1, 1, 1, 1], 3),  # ends at full length
        ([5, EOS, EOS, EOS], [1, 1, 0, 0], 1),  # padded with the end token
        ([PAD, PAD, PAD, PAD], [0, 0, 0, 0], -1),  # empty
        ([9, 9, 9, EOI], [1, 1, 1, 0], 2),  # image span: its end token is not the policy's
    ],
)
def test_ppo_08_score_lands_on_the_last_real_token(ids: list[int], mask: list[int], position: int) -> None:
    """The mask says what is real; ids, padding and end tokens are never looked at."""
    assert len(ids) == len(mask)
    valid = torch.tensor([mask]).bool()
    zeros = torch.zeros(1, 4)
    rewards = kl_penalty_rewards(torch.tensor([7.0]), zeros, zeros, valid, kl_coef=0.1)
    assert last_valid_index(valid).tolist() == [position]
    expected = [0.0] * 4
    if position >= 0:
        expected[position] = 7.0
    assert rewards.tolist() == [expected]


GAMMA, LAM = 0.9, 0.8
CHAIN_REWARDS = torch.tensor([[0.0, 0.0, 1.0]])
CHAIN_VALUES = torch.tensor([[0.5, 0.6, 0.7]])
CHAIN_MASK = torch.ones(1, 3, dtype=torch.bool)


def closed_form(last_value: float) -> Tensor:
    """The three-step chain written out: d0 = 0.04, d1 = 0.03, d2 = 0.3 + 0.9 V."""
    d0, d1, d2 = 0.9 * 0.6 - 0.5, 0.9 * 0.7 - 0.6, 1.0 + 0.9 * last_value - 0.7
    decay = GAMMA * LAM
    return torch.tensor([[d0 + decay * d1 + decay**2 * d2, d1 + decay * d2, d2]])


def test_ppo_09_a_cut_is_bootstrapped_and_an_end_is_not() -> None:
    arguments = (CHAIN_REWARDS, CHAIN_VALUES, CHAIN_MASK)
    ended, ended_returns = gae(*arguments, gamma=GAMMA, lam=LAM)
    cut, cut_returns = gae(*arguments, gamma=GAMMA, lam=LAM, bootstrap_B=torch.tensor([2.0]))
    torch.testing.assert_close(ended, closed_form(0.0))
    torch.testing.assert_close(cut, closed_form(2.0))
    torch.testing.assert_close(ended_returns, closed_form(0.0) + CHAIN_VALUES)
    torch.testing.assert_close(cut_returns, closed_form(2.0) + CHAIN_VALUES)


def test_ppo_09_rows_keep_their_own_flag_and_padding_is_no_end() -> None:
    """A cut text, an image span of full length and a padded response in one batch."""
    rewards = CHAIN_REWARDS.repeat(3, 1)
    values = CHAIN_VALUES.repeat(3, 1)
    padding = torch.tensor([[5.0], [5.0], [5.0]])
    mask = torch.tensor([[True, True, True, False]]).repeat(3, 1)
    advantages, _ = gae(
        torch.cat([rewards, padding], 1),
        torch.cat([values, padding], 1),
        mask,
        gamma=GAMMA,
        lam=LAM,
        bootstrap_B=torch.tensor([2.0, 0.0, 0.0]),
    )
    expected = torch.cat([closed_form(2.0), closed_form(0.0), closed_form(0.0)])
    torch.testing.assert_close(advantages[:, :3], expected)
    assert not advantages[:, 3].any()
