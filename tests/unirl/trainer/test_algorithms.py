from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from unirl.trainer.algorithms import ALGORITHMS, RolledOut, kl_place, loss_count, loss_weights
from unirl.trainer.stage_checks import NEED_GROUPS
from unirl.trainer.stages import AlgorithmName, Stage

STAGE = Stage(name="s", direction="text", prompts="true", steps=1, max_words=3, group_size=2)


def rolled_out() -> RolledOut:
    """Two prompts x two texts; the last could not be scored. Scores 1, 0, 0.5 and NaN at the last word."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    rewards = torch.tensor(
        [[-0.1, 0.0, 1.0, 9.0], [0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 0.0, 0.5], [torch.nan] * 4]
    )
    return RolledOut(
        rewards=rewards,
        values=torch.full((4, 4), 0.5),
        mask=mask,
        is_scored=torch.tensor([True, True, True, False]),
        group_size=2,
    )


def test_every_name_has_an_algorithm_and_every_algorithm_a_name() -> None:
    assert set(ALGORITHMS) == set(get_args(AlgorithmName))
    assert set(NEED_GROUPS) < set(ALGORITHMS)


def test_a_rows_reward_is_the_sum_of_its_tokens() -> None:
    rewards = rolled_out().rewards_PG()
    torch.testing.assert_close(rewards, torch.tensor([[0.9, 0.0], [0.5, torch.nan]]), equal_nan=True)


@pytest.mark.parametrize(
    ("algorithm", "first", "second"),
    [
        # deviation of (0.9, 0) is 0.9 / sqrt 2, so that the normalised advantages are +-1 / sqrt 2
        ("grpo", 0.70711, -0.70711),
        ("dapo", 0.70711, -0.70711),
        ("gspo", 0.70711, -0.70711),
        ("drpo", 0.70711, -0.70711),
        ("dr_grpo", 0.45, -0.45),
        ("reinforce_pp_baseline", 0.45, -0.45),
        ("rloo", 0.9, -0.9),
    ],
)
def test_groups_are_compared(algorithm: AlgorithmName, first: float, second: float) -> None:
    """A prompt with a single scored sample teaches nothing."""
    advantages = ALGORITHMS[algorithm].credit(rolled_out(), STAGE).advantages
    wanted = torch.tensor([[first] * 3 + [0.0], [second] * 2 + [0.0] * 2, [0.0] * 4, [0.0] * 4])
    torch.testing.assert_close(advantages, wanted, atol=1e-5, rtol=0)


def test_ppo_credits_by_gae_and_reinforce_by_returns() -> None:
    stage = replace(STAGE, gamma=0.5, lam=1.0)
    ppo = ALGORITHMS["ppo"].credit(rolled_out(), stage)
    plain = ALGORITHMS["reinforce_pp"].credit(rolled_out(), stage)
    # Row 0: R = -0.1 + 0.5 (0 + 0.5 x 1) = 0.15, 0.5, 1; with lam = 1 the advantage is R - 0.5.
    torch.testing.assert_close(plain.advantages[0, :3], torch.tensor([0.15, 0.5, 1.0]))
    torch.testing.assert_close(ppo.advantages[0, :3], torch.tensor([-0.35, 0.0, 0.5]))
    torch.testing.assert_close(ppo.returns[0, :3], plain.returns[0, :3])


def test_what_a_loss_is_a_mean_over() -> None:
    mask = rolled_out().mask
    totals = {name: float(loss_count(replace(STAGE, algorithm=name), mask).sum()) for name in ALGORITHMS}
    tokens, responses, limit = 9.0, 3.0, 3.0 * (STAGE.max_words + 1)
    by_limit, by_response = {"dr_grpo"}, {"grpo", "gspo"}
    for name, total in totals.items():
        assert total == (limit if name in by_limit else responses if name in by_response else tokens)
        weights = loss_weights(replace(STAGE, algorithm=name), mask)
        if name in by_response:
            assert weights is not None
            torch.testing.assert_close(weights.sum(dim=1), torch.tensor([1.0, 1.0, 1.0, 0.0]))
        else:
            assert weights is None


def test_the_stage_has_the_last_word_on_the_place_of_the_penalty() -> None:
    assert kl_place(replace(STAGE, algorithm="ppo")) == "reward"
    assert kl_place(replace(STAGE, algorithm="grpo")) == "loss"
    assert kl_place(replace(STAGE, algorithm="grpo", kl_in="reward")) == "reward"
