"""Values that verl 0.9.1 and OpenRLHF 0.11.2 gave for the inputs below, float64 on CPU.

Each constant names the call it came from; the peers' own functions were run once and are not needed here.
verl adds 1e-8 to counts, hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unirl.algorithms import (
    AdaptiveKL,
    discounted_returns,
    dr_grpo_advantages,
    gae,
    group_advantages,
    gspo_loss,
    kl_k3,
    kl_loss,
    kl_penalty_rewards,
    mean_metrics,
    overlong_penalty,
    policy_loss,
    rloo_advantages,
    sequence_mean_weights,
    spread_to_tokens,
    truncated_importance_weights,
    value_loss,
    whiten,
)


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


LOGPROBS = table([[-0.7, -1.9, -0.2, -2.5], [-1.1, -0.4, -3.0, -0.6], [-0.9, -1.3, -0.5, -1.7]])
OLD = table([[-1.0, -1.2, -0.3, -2.4], [-1.3, -1.5, -1.6, -0.6], [-0.8, -1.3, -0.9, -1.1]])
REF = table([[-1.2, -1.5, -0.1, -2.0], [-0.9, -1.0, -2.8, -0.7], [-1.4, -1.1, -0.5, -3.2]])
ADVANTAGES = table([[1.5, -0.5, 0.8, -2.0], [-1.2, -0.7, 2.2, 0.4], [0.6, -1.6, -0.3, 1.0]])
MASK = table([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 1]]).bool()
VALUES = table([[0.3, -0.2, 0.5, 0.9], [1.0, 0.4, -0.6, 0.2], [0.1, 0.7, 0.2, -0.4]])
OLD_VALUES = table([[0.1, 0.1, 0.4, 0.3], [0.7, 0.9, -0.5, 0.0], [0.2, 0.2, 0.1, 0.1]])
RETURNS = table([[0.5, 0.6, -0.3, 1.0], [1.4, 0.2, 0.3, 0.0], [0.0, 0.9, 0.0, -0.9]])
REWARDS = table([[0, 0.1, 0, 1.0], [0, -0.2, 2.0, 0], [0.3, 0, 0, -1.0]])
GROUPS = table([[1.0, 0.0, 0.5], [0.25, 0.9, 0.3]])
TOKENS = 10
RESPONSES = 3


def close(actual: Tensor, expected: list[list[float]] | list[float] | float, atol: float = 2e-8) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


def loss_and_gradient(loss: Callable[[Tensor], Tensor], at: Tensor = LOGPROBS) -> tuple[Tensor, Tensor]:
    point = at.clone().requires_grad_()
    value = loss(point)
    value.backward()
    assert point.grad is not None
    return value.detach(), point.grad


def test_gae() -> None:
    """verl compute_gae_advantage_return(REWARDS, VALUES, MASK, 0.97, 0.9); a gap in the last row."""
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.97, lam=0.9)
    close(
        whiten(advantages, MASK),
        [
            [0.160294216, 0.720034293, 0.08926591, -0.223538966],
            [-0.017216759, 0.634048201, 1.946908408, 0.0],
            [-0.768843379, -1.709687691, 0.0, -0.83126423],
        ],
    )
    close(
        returns,
        [
            [0.842112979, 0.9868419, 0.9603, 1.0],
            [1.3376494, 1.4878, 2.0, 0.0],
            [-0.4281014, -0.9118, 0.0, -1.0],
        ],
    )


def test_gae_without_a_gap_is_that_of_openrlhf() -> None:
    """OpenRLHF get_advantages_and_returns(VALUES[:1], REWARDS[:1], MASK[:1], 0.97, 0.9)."""
    advantages, returns = gae(REWARDS[:1], VALUES[:1], MASK[:1], gamma=0.97, lam=0.9)
    close(advantages, [[0.542112979, 1.1868419, 0.4603, 0.1]])
    close(returns, [[0.842112979, 0.9868419, 0.9603, 1.0]])


def test_group_advantages() -> None:
    """verl compute_grpo_outcome_advantage, with and without the deviation; compute_rloo_outcome_advantage."""
    close(group_advantages(GROUPS), [[0.999998, -0.999998, 0.0], [-0.645084165, 1.151936009, -0.506851844]])
    close(rloo_advantages(GROUPS), [[0.75, -0.75, 0.0], [-0.35, 0.625, -0.275]])
    close(dr_grpo_advantages(GROUPS), [[0.5, -0.5, 0.0], [-0.233333333, 0.416666667, -0.183333333]])


def test_reinforce_plus_plus() -> None:
    """verl compute_reinforce_plus_plus_outcome_advantage(REWARDS, MASK, gamma=0.97)."""
    returns = discounted_returns(REWARDS, MASK, gamma=0.97)
    close(
        returns,
        [[1.009673, 1.0409, 0.97, 1.0], [1.6878, 1.74, 2.0, 0.0], [-0.6409, -0.97, 0.0, -1.0]],
    )
    close(
        whiten(returns, MASK),
        [
            [0.287126948, 0.314636632, 0.25217669, 0.278605438],
            [0.88452855, 0.930514573, 1.159563728, 0.0],
            [-1.16695902, -1.456882393, 0.0, -1.483311142],
        ],
    )


def test_reinforce_plus_plus_baseline() -> None:
    """verl compute_reinforce_plus_plus_baseline_outcome_advantage; rows of 2, 3, 1, 3, 2, 3 tokens."""
    mask = torch.arange(3) < torch.tensor([2, 3, 1, 3, 2, 3]).unsqueeze(1)
    advantages = whiten(spread_to_tokens(dr_grpo_advantages(GROUPS).flatten(), mask), mask)
    row = [1.519093957, -1.167303778, 0.17589509, -0.450931048, 1.295227479, -0.316611162]
    close(advantages, torch.where(mask, torch.tensor(row, dtype=torch.float64).unsqueeze(1), 0.0).tolist())


PPO_GRADIENT = [
    [0.0, 0.0, -0.088413673, 0.180967484],
    [0.146568331, 0.210291622, -0.054251332, 0.0],
    [-0.054290245, 0.16, 0.0, -0.054881164],
]


def test_policy_loss() -> None:
    """verl compute_policy_loss_vanilla, token-mean, clip 0.2 and 0.3; the same from OpenRLHF PolicyLoss."""
    loss, gradient = loss_and_gradient(
        lambda x: policy_loss(x, OLD, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.3, denominator=TOKENS)[0]
    )
    close(loss, 0.290991022)
    close(gradient, PPO_GRADIENT)
    metrics = policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.3, denominator=TOKENS)[1]
    assert mean_metrics(metrics)["policy/clip_fraction"] == pytest.approx(0.2)


def test_dual_clip() -> None:
    """verl compute_policy_loss_vanilla and OpenRLHF PolicyLoss with a dual clip of 1.5."""

    def loss_of(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(
            x, OLD, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.3, denominator=TOKENS, dual_clip=1.5
        )

    loss, gradient = loss_and_gradient(lambda x: loss_of(x)[0])
    close(loss, 0.1856994)
    expected = [row.copy() for row in PPO_GRADIENT]
    expected[1][1] = 0.0
    close(gradient, expected)
    assert mean_metrics(loss_of(LOGPROBS)[1])["policy/dual_clip_fraction"] == pytest.approx(0.1)


def test_policy_loss_as_mean_over_responses() -> None:
    """verl compute_policy_loss_vanilla, seq-mean-token-mean."""
    loss, gradient = loss_and_gradient(
        lambda x: policy_loss(
            x,
            OLD,
            ADVANTAGES,
            MASK,
            clip_low=0.2,
            clip_high=0.3,
            denominator=RESPONSES,
            weights_BT=sequence_mean_weights(MASK),
        )[0]
    )
    close(loss, 0.340669521)
    close(
        gradient,
        [
            [0.0, 0.0, -0.073678061, 0.150806236],
            [0.162853701, 0.233657357, -0.060279258, 0.0],
            [-0.060322494, 0.177777777, 0.0, -0.06097907],
        ],
    )


def test_gspo() -> None:
    """verl compute_policy_loss_gspo, seq-mean-token-mean, clip 0.1 and 0.15."""
    loss, gradient = loss_and_gradient(lambda x: gspo(x, ADVANTAGES))
    close(loss, 0.00205972)
    close(
        gradient,
        [
            [-0.113104677, 0.037701559, -0.060322494, 0.150806236],
            [0.128962146, 0.075227919, -0.236430602, 0.0],
            [-0.052792638, 0.0, 0.0, -0.087987729],
        ],
    )


def test_gspo_with_one_advantage_a_response() -> None:
    """OpenRLHF PolicyLoss(0.1, 0.15, policy_loss_type="gspo") differentiates the sequence ratio itself."""
    loss, gradient = loss_and_gradient(lambda x: gspo(x, ADVANTAGES[:, :1].expand(-1, 4)))
    close(loss, -0.223910182)
    close(
        gradient,
        [
            [-0.113104677] * 4,
            [0.128962146, 0.128962146, 0.128962146, 0.0],
            [-0.052792638, -0.052792638, 0.0, -0.052792638],
        ],
    )


def gspo(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return gspo_loss(
        logprobs,
        OLD,
        advantages,
        MASK,
        clip_low=0.1,
        clip_high=0.15,
        denominator=RESPONSES,
        weights_BT=sequence_mean_weights(MASK),
    )[0]


def test_value_loss() -> None:
    """verl compute_value_loss, clip 0.2 (OpenRLHF ValueLoss(0.2) the same); OpenRLHF ValueLoss(None)."""
    loss, gradient = loss_and_gradient(
        lambda x: value_loss(x, OLD_VALUES, RETURNS, MASK, clip=0.2, denominator=TOKENS)[0], at=VALUES
    )
    close(loss, 0.189)
    close(gradient, [[-0.02, -0.08, 0.08, 0.0], [0.0, 0.0, -0.09, 0.0], [0.01, 0.0, 0.0, 0.0]])
    metrics = value_loss(VALUES, OLD_VALUES, RETURNS, MASK, clip=0.2, denominator=TOKENS)[1]
    assert mean_metrics(metrics)["value/clip_fraction"] == pytest.approx(0.5)
    close(value_loss(VALUES, OLD_VALUES, RETURNS, MASK, clip=None, denominator=TOKENS)[0], 0.132)


K2_GRADIENT = [[0.05, -0.04, -0.01, -0.05], [-0.02, 0.06, -0.02, 0.0], [0.05, -0.02, 0.0, 0.15]]
K3_GRADIENT = [
    [0.039346934, -0.04918247, -0.010517092, -0.064872127],
    [-0.022140276, 0.045118836, -0.022140276, 0.0],
    [0.039346934, -0.022140276, 0.0, 0.077686984],
]


@pytest.mark.parametrize(
    ("estimator", "gradient_from_k2", "value", "expected"),
    [
        ("k1", False, 0.15, (MASK.double() / TOKENS).tolist()),
        ("k2", False, 0.1825, K2_GRADIENT),
        ("k3", False, 0.139492828, K3_GRADIENT),
        ("k3", True, 0.139492828, K2_GRADIENT),
    ],
)
def test_kl_loss(estimator: str, gradient_from_k2: bool, value: float, expected: list[list[float]]) -> None:
    """verl kl_penalty "k1", "k2", "k3", "k3+", summed over MASK and divided by 10."""
    loss, gradient = loss_and_gradient(
        lambda x: kl_loss(
            x, REF, MASK, estimator=estimator, denominator=TOKENS, gradient_from_k2=gradient_from_k2
        )[0]
    )
    close(loss, value)
    close(gradient, expected)


def test_k3_far_from_the_reference() -> None:
    """verl kl_penalty_forward(.., "k3"), capped at 10."""
    far = kl_k3(table([[-1.0, -9.0, 0.0]]), table([[-0.5, 0.0, -30.0]]))
    close(far, [[0.148721271, 10.0, 10.0]])


def test_kl_penalty_rewards() -> None:
    """OpenRLHF compute_reward([1, 0, -0.5], 0.1, (OLD - REF) * MASK, MASK)."""
    rewards = kl_penalty_rewards(torch.tensor([1.0, 0.0, -0.5]), OLD, REF, MASK, kl_coef=0.1)
    close(rewards, [[-0.02, -0.03, 0.02, 1.04], [0.04, 0.05, -0.12, 0.0], [-0.06, 0.02, 0.0, -0.71]])


def test_truncated_importance_weights() -> None:
    """verl compute_rollout_correction_weights(LOGPROBS - OLD, MASK, "token" | "sequence", 1.5)."""
    close(
        truncated_importance_weights(LOGPROBS, OLD, MASK, limit=1.5),
        [
            [1.349858808, 0.496585304, 1.105170918, 0.904837418],
            [1.221402758, 1.5, 0.246596964, 0.0],
            [0.904837418, 1.0, 0.0, 0.548811636],
        ],
    )
    close(
        truncated_importance_weights(LOGPROBS, OLD, MASK, limit=1.5, level="sequence"),
        [
            [0.670320046] * 4,
            [0.904837418, 0.904837418, 0.904837418, 0.0],
            [0.496585304, 0.496585304, 0.0, 0.496585304],
        ],
    )


def test_overlong_penalty() -> None:
    """OpenRLHF apply_overlong_penalty, max_new_tokens 10, buffer 4, factor 0.5."""
    penalty = overlong_penalty(torch.tensor([3, 6, 7, 8, 10, 12]), max_length=10, buffer_length=4, factor=0.5)
    assert penalty.tolist() == [0.0, 0.0, -0.125, -0.25, -0.5, -0.5]


def test_adaptive_kl() -> None:
    """verl AdaptiveKLController(0.2, 6, 10000), five updates of 256."""
    controller = AdaptiveKL(value=0.2, target=6.0, horizon=10000)
    for kl, expected in [
        (8.0, 0.201024),
        (5.9, 0.20093823),
        (1.0, 0.199909426),
        (-3.0, 0.19888589),
        (6.5, 0.19931018),
    ]:
        controller = controller.update(kl, 256)
        assert controller.value == pytest.approx(expected, abs=1e-9)
