"""From prompts to experience: roll out, score, and give every token its credit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from unirl.algorithms import kl_penalty_rewards, overlong_penalty, scored_mask
from unirl.errors import ConfigError, RewardError
from unirl.policies.image_tokenizer import ImageTokenizer, uint8_from_pixels
from unirl.policies.policy import Policy, PolicyOutput
from unirl.rollout.engine import RolloutEngine, RolloutRequest
from unirl.trainer.advantage_norm import normalize_advantages
from unirl.trainer.algorithms import ALGORITHMS, Credit, RolledOut, kl_place
from unirl.trainer.mismatch import old_logprobs_and_weights
from unirl.trainer.row_batches import replay_rollouts
from unirl.trainer.scoring_passes import ScoringPasses
from unirl.trainer.stages import Stage
from unirl.types import Experience, Prompt, Rollout, Sample, SamplingSettings, Scores

__all__ = ["make_experience", "response_texts", "roll_out", "samples_of", "split_scores"]


def roll_out(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    length: int,
    sampling: SamplingSettings,
    seeds: Sequence[tuple[int, ...]],
    micro_prompts: int,
) -> list[Rollout]:
    """Sample from a list of prompts, `micro_prompts` at a time.

    Args:
        engine: Samples with the weights that it was last synced to.
        prompts: P prompts of one direction.
        group_size: G.
        length: T.
        sampling: Temperature and guidance.
        seeds: One for each prompt; see `RolloutRequest`.
        micro_prompts: Prompts in one call of the engine.

    Returns:
        One rollout per `micro_prompts` prompts. They keep their own padding.
    """
    return [
        engine.rollout(
            RolloutRequest(
                prompts=prompts[start : start + micro_prompts],
                group_size=group_size,
                max_new_tokens=length,
                sampling=sampling,
                seeds=seeds[start : start + micro_prompts],
            )
        )
        for start in range(0, len(prompts), micro_prompts)
    ]


def response_texts(policy: Policy, rollout: Rollout) -> list[str]:
    """What each of B rows wrote; empty strings for pictures."""
    if rollout.prompts[0].direction == "image":
        return [""] * len(rollout.input_ids)
    lengths = rollout.response_mask.sum(dim=1).tolist()
    return [
        policy.vocabulary.text(ids[:length])
        for ids, length in zip(rollout.response_ids.tolist(), lengths, strict=True)
    ]


def samples_of(policy: Policy, tokenizer: ImageTokenizer, rollout: Rollout) -> list[Sample]:
    """Turn B token rows into what a reward sees: a picture and the words that go with it."""
    direction = rollout.prompts[0].direction
    prompts = [prompt for prompt in rollout.prompts for _ in range(rollout.group_size)]
    if direction == "image":
        codes = policy.vocabulary.codes(rollout.response_ids)
        pictures = list(uint8_from_pixels(tokenizer.decode(codes)))
        captions = [prompt.caption for prompt in prompts]
    else:
        pictures = [_picture(prompt) for prompt in prompts]
        captions = response_texts(policy, rollout)
    return [
        Sample(
            key=prompt.key,
            direction=direction,
            caption=caption,
            image=picture,
            target=prompt.caption,
            clip=_clip(prompt, picture),
        )
        for prompt, caption, picture in zip(prompts, captions, pictures, strict=True)
    ]


def split_scores(scores: Scores, samples: Sequence[Sequence[Sample]]) -> list[Scores]:
    """Cut the scores of all samples into one part for each micro-batch."""
    ends = np.cumsum([len(part) for part in samples])
    return [
        Scores(
            total=scores.total[end - len(part) : end],
            components={name: values[end - len(part) : end] for name, values in scores.components.items()},
        )
        for end, part in zip(ends, samples, strict=True)
    ]


_BOTH_MODELS = ScoringPasses()


class _Part(NamedTuple):
    """What is known of one rollout before the moments of all are."""

    values: Tensor
    mask: Tensor
    old_logprobs: Tensor
    importance: Tensor | None
    credit: Credit


@torch.no_grad()
def make_experience(
    accelerator: Accelerator,
    policy: Policy,
    reference: Policy,
    rollouts: Sequence[Rollout],
    scores: Sequence[Scores],
    stage: Stage,
    *,
    kl_coef: float | None = None,
    micro_batch_tokens: int = 0,
    passes: ScoringPasses = _BOTH_MODELS,
) -> tuple[list[Experience], Sequence[PolicyOutput | None]]:
    """Spread scores over tokens as the stage's algorithm does; moments are those of all ranks.

    A response that reached the length limit counts as ended (the limit is part of the task), so nothing is
    bootstrapped. Rows without a score leave the loss and the statistics. `kl_coef` is the weight of a penalty
    in the reward; None takes the stage's, for each modality. `micro_batch_tokens` is that of
    `replay_rollouts`; `passes` says which of the two models are run.

    Returns:
        One experience per rollout, and what the policy says of the rollout's tokens before the update, from
        which the caller can tell how far trainer and engine agree; None if it is not run.

    Raises:
        RewardError: If no sample of any rank has a score, or their number is not that of the samples.
    """
    algorithm = ALGORITHMS[stage.algorithm]

    def replay(model: Policy, *, is_run: bool, with_values: bool) -> Sequence[PolicyOutput | None]:
        if not is_run:
            return [None] * len(rollouts)
        budget, sampling = micro_batch_tokens, stage.sampling
        return replay_rollouts(
            accelerator, model, policy, rollouts, sampling, tokens=budget, with_values=with_values
        )

    outputs = replay(policy, is_run=passes.policy, with_values=algorithm.uses_critic)
    references = replay(reference, is_run=passes.reference, with_values=False)
    ref_logprobs = [None if output is None else output.logprobs for output in references]
    parts: list[_Part] = []
    for rollout, output, behind, score in zip(rollouts, outputs, ref_logprobs, scores, strict=True):
        if len(score.total) != len(rollout.input_ids):
            raise RewardError(
                f"the reward gave {len(score.total)} scores for {len(rollout.input_ids)} samples"
            )
        total = torch.from_numpy(score.total).float().to(rollout.old_logprobs.device)
        total = total + _length_charge(rollout, stage)
        mask = scored_mask(rollout.response_mask, total)
        old, importance = rollout.old_logprobs, None
        values = torch.zeros_like(old)
        if output is not None:
            old, importance = old_logprobs_and_weights(output, rollout, mask, stage)
            values = output.values
        weight = stage.of(rollout.direction).kl_coef if kl_coef is None else kl_coef
        penalty = weight if kl_place(stage) == "reward" else 0.0
        rolled_out = RolledOut(
            rewards=kl_penalty_rewards(total, old, old if behind is None else behind, mask, penalty),
            values=values,
            mask=mask,
            is_scored=~total.isnan(),
            group_size=rollout.group_size,
        )
        parts.append(_Part(values, mask, old, importance, algorithm.credit(rolled_out, stage)))
    advantages = normalize_advantages(
        accelerator,
        [part.credit.advantages for part in parts],
        [part.mask for part in parts],
        [rollout.direction for rollout in rollouts],
        stage,
        [rollout.group_size for rollout in rollouts],
    )
    experiences = [
        Experience(
            rollout=rollout,
            scores=score,
            old_logprobs=part.old_logprobs,
            importance=part.importance,
            ref_logprobs=behind,
            old_values=part.values,
            loss_mask=part.mask,
            advantages=advantage,
            returns=part.credit.returns,
        )
        for rollout, behind, score, part, advantage in zip(
            rollouts, ref_logprobs, scores, parts, advantages, strict=True
        )
    ]
    return experiences, outputs


def _length_charge(rollout: Rollout, stage: Stage) -> Tensor | float:
    """What is added to the scores (B,) of texts that come near the length limit."""
    if not stage.overlong_buffer or rollout.direction == "image":
        return 0.0
    return overlong_penalty(
        rollout.response_mask.sum(dim=1),
        max_length=stage.max_words,
        buffer_length=stage.overlong_buffer,
        factor=stage.overlong_factor,
    )


def _clip(prompt: Prompt, picture: np.ndarray) -> np.ndarray | None:
    """The frames that the prompt shows, and the picture after them."""
    if prompt.context_images is None or prompt.context_images.shape[1:] != picture.shape:
        return None
    pictures: np.ndarray = np.concatenate([prompt.context_images, picture[None]])
    return pictures


def _picture(prompt: Prompt) -> np.ndarray:
    if prompt.image is None:
        raise ConfigError(
            f"{prompt.key}: a prompt that is answered with text needs its picture for the reward"
        )
    return prompt.image
