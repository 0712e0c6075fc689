"""Reinforcement-learning algorithms as pure functions over tensors.

Each returns tensors or `(loss, metrics)`; none logs, moves devices or keeps state. Axes: P prompts,
G samples a prompt, B = P * G rows, T response tokens, V vocabulary. `docs/algorithms.md` has the formulas.
"""

from unirl.algorithms.advantages import dr_grpo_advantages, group_advantages, rloo_advantages
from unirl.algorithms.gae import gae
from unirl.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, kl_k1, kl_k2, kl_k3, kl_loss, straight_through
from unirl.algorithms.masking import Moments, masked_moments_sums, masked_sum, moments_from_sums, whiten
from unirl.algorithms.metric_sums import add_metrics, mean_metrics, token_metrics
from unirl.algorithms.policy_loss import policy_loss
from unirl.algorithms.sampling import log_distribution, sample_tokens, token_logprobs
from unirl.algorithms.schedule import learning_rate_factor
from unirl.algorithms.token_rewards import kl_penalty_rewards, last_valid_index, scored_mask
from unirl.algorithms.value_loss import value_loss

__all__ = [
    "KL_ESTIMATORS",
    "AdaptiveKL",
    "Moments",
    "add_metrics",
    "dr_grpo_advantages",
    "gae",
    "group_advantages",
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
    "policy_loss",
    "rloo_advantages",
    "sample_tokens",
    "scored_mask",
    "straight_through",
    "token_logprobs",
    "token_metrics",
    "value_loss",
    "whiten",
]
