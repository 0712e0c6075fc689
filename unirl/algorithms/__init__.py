"""Reinforcement-learning algorithms as pure functions over tensors.

Each returns tensors or `(loss, metrics)`; none logs, moves devices or keeps state. Axes: P prompts,
G samples a prompt, B = P * G rows, T response tokens, V vocabulary. `docs/algorithms.md` has the formulas.
"""

from unirl.algorithms.advantages import (
    dr_grpo_advantages,
    group_advantages,
    informative_groups,
    rloo_advantages,
)
from unirl.algorithms.drpo import drpo_loss
from unirl.algorithms.entropy import AdaptiveEntropy
from unirl.algorithms.gae import discounted_returns, gae
from unirl.algorithms.gspo import gspo_loss
from unirl.algorithms.importance import truncated_importance_weights
from unirl.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, kl_k1, kl_k2, kl_k3, kl_loss, straight_through
from unirl.algorithms.length_penalty import overlong_penalty
from unirl.algorithms.masking import (
    Moments,
    masked_moments_sums,
    masked_sum,
    moments_from_sums,
    sequence_mean_weights,
    whiten,
)
from unirl.algorithms.metric_sums import add_metrics, mean_metrics, token_metrics
from unirl.algorithms.policy_loss import policy_loss
from unirl.algorithms.sampling import log_distribution, sample_tokens, sampling_errors, token_logprobs
from unirl.algorithms.schedule import learning_rate_factor
from unirl.algorithms.token_rewards import kl_penalty_rewards, last_valid_index, scored_mask, spread_to_tokens
from unirl.algorithms.value_loss import value_loss

__all__ = [
    "KL_ESTIMATORS",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "Moments",
    "add_metrics",
    "discounted_returns",
    "dr_grpo_advantages",
    "drpo_loss",
    "gae",
    "group_advantages",
    "gspo_loss",
    "informative_groups",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_loss",
    "kl_penalty_rewards",
    "last_valid_index",
    "learning_rate_factor",
    "log_distribution",
    "masked_moments_sums",
    "masked_sum",
    "mean_metrics",
    "moments_from_sums",
    "overlong_penalty",
    "policy_loss",
    "rloo_advantages",
    "sample_tokens",
    "sampling_errors",
    "scored_mask",
    "sequence_mean_weights",
    "spread_to_tokens",
    "straight_through",
    "token_logprobs",
    "token_metrics",
    "truncated_importance_weights",
    "value_loss",
    "whiten",
]
