"""From one score a response to one reward a token."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.algorithms.kl import kl_k1
from unirl.algorithms.tensor_checks import as_float, require_mask, require_rank, require_same_shape
from unirl.errors import ShapeError

__all__ = ["kl_penalty_rewards", "last_valid_index", "scored_mask", "spread_to_tokens"]


def last_valid_index(mask_BT: Tensor) -> Tensor:
    """Return the position of each row's last valid token.

    Args:
        mask_BT: Bool (B, T), with gaps or not.

    Returns:
        Int64 (B,); -1 for a row without a valid token.
    """
    require_rank(2, mask_BT=mask_BT)
    require_mask(mask_BT=mask_BT)
    positions = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    before_first = positions.new_full((mask_BT.shape[0], 1), -1)
    return torch.cat([before_first, torch.where(mask_BT, positions, -1)], dim=1).amax(1)


def scored_mask(mask_BT: Tensor, scores_B: Tensor) -> Tensor:
    """Take the rows that could not be scored (NaN) out of the mask, so that nothing is learned from them.

    Args:
        mask_BT: Bool (B, T).
        scores_B: Float (B,), NaN where a sample could not be scored.

    Returns:
        Bool (B, T).
    """
    _require_row_scores(scores_B, mask_BT)
    return mask_BT & ~scores_B.isnan().to(mask_BT.device).unsqueeze(1)


def spread_to_tokens(advantages_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Give every valid token of a row the row's advantage.

    Args:
        advantages_B: Float (B,), for example `group_advantages(rewards_PG).flatten()`.
        mask_BT: Bool (B, T).

    Returns:
        Float (B, T); 0 where the mask is False.
    """
    require_mask(mask_BT=mask_BT)
    _require_row_scores(advantages_B, mask_BT)
    return torch.where(mask_BT, advantages_B.to(mask_BT.device).unsqueeze(1), 0.0)


def kl_penalty_rewards(
    scores_B: Tensor,
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    kl_coef: float,
) -> Tensor:
    """Put the score on each row's last valid token and charge every valid token for leaving the reference.

        r[b, t] = -kl_coef (logprob[b, t] - ref_logprob[b, t]) + score[b] [t is the last valid token of b]

    Args:
        scores_B: Float (B,), reward of each response, any unit. NaN travels to the last token; call
            `scored_mask` first to leave such rows out.
        logprobs_BT: Float (B, T), nats, of the policy that sampled.
        ref_logprobs_BT: Float (B, T), nats, of the frozen reference.
        mask_BT: Bool (B, T). The last valid token is the end token of a response that ended, the last word
            of one that was cut, the last code of an image span; never padding, whatever id pads.
        kl_coef: Reward units a nat; 0 for no penalty.

    Returns:
        Float32 (float64 for float64 log-probs) (B, T), no gradient; 0 where the mask is False. An empty
        response has no token to hold its score: its row is 0 and teaches nothing.

    Raises:
        ShapeError: If shapes differ or the mask is not bool.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback",
    arXiv:2203.02155, equation 2; k1 of `unirl.algorithms.kl`.
    """
    require_rank(2, logprobs_BT=logprobs_BT)
    require_same_shape(logprobs_BT=logprobs_BT, ref_logprobs_BT=ref_logprobs_BT, mask_BT=mask_BT)
    require_mask(mask_BT=mask_BT)
    _require_row_scores(scores_B, mask_BT)
    penalty = kl_coef * kl_k1(as_float(logprobs_BT.detach()), as_float(ref_logprobs_BT.detach()))
    rewards = torch.where(mask_BT, -penalty, 0.0)
    positions = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    is_last = positions == last_valid_index(mask_BT).unsqueeze(1)
    scores = scores_B.detach().to(device=rewards.device, dtype=rewards.dtype)
    return torch.where(is_last, rewards + scores.unsqueeze(1), rewards)


def _require_row_scores(scores_B: Tensor, mask_BT: Tensor) -> None:
    if scores_B.shape != mask_BT.shape[:1]:
        raise ShapeError(
            f"scores_B has shape {tuple(scores_B.shape)}, mask_BT has {tuple(mask_BT.shape)}; "
            f"one score a row, shape {tuple(mask_BT.shape[:1])}, is needed"
        )
