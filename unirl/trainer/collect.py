"""From prompts to experience: roll out, score, and give every token its credit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from unirl.algorithms import kl_penalty_rewards, overlong_penalty, scored_mask, whiten
from unirl.errors import ConfigError, RewardError
from unirl.policies.image_tokenizer import ImageTokenizer, uint8_from_pixels
from unirl.policies.token_lm import PolicyOutput, TokenLM
from unirl.rollout.native import NativeEngine, sample_uniforms
from unirl.trainer.algorithms import ALGORITHMS, Credit, RolledOut, kl_place
from unirl.trainer.distributed import global_moments
from unirl.trainer.stages import Stage
from unirl.types import Experience, Prompt, Rollout, Sample, Scores

__all__ = ["make_experience", "response_texts", "roll_out", "samples_of", "score_tokens"]


def roll_out(
    engine: NativeEngine,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    length: int,
    temperature: float,
    seeds: Sequence[Sequence[int]],
    micro_prompts: int,
    policy_version: int = 0,
) -> list[Rollout]:
    """Sample from a list of prompts, `micro_prompts` at a time.

    Args:
        engine: Samples with the policy's present weights.
        prompts: P prompts of one direction.
        group_size: G.
        length: T.
        temperature: Divides the logits.
        seeds: One for each prompt; see `sample_uniforms`.
        micro_prompts: Prompts in one call of the engine.
        policy_version: Recorded with the rollout.

    Returns:
        One rollout per `micro_prompts` prompts. They keep their own padding.
    """
    uniforms = np.stack([sample_uniforms(seed, group_size, length) for seed in seeds])
    return [
        engine.rollout(
            prompts[start : start + micro_prompts],
            uniforms[start : start + micro_prompts],
            temperature=temperature,
            policy_version=policy_version,
        )
        for start in range(0, len(prompts), micro_prompts)
    ]


def response_texts(policy: TokenLM, rollout: Rollout) -> list[str]:
    """What each of B rows wrote; empty strings for pictures."""
    if rollout.prompts[0].direction == "image":
        return [""] * len(rollout.input_ids)
    lengths = rollout.response_mask.sum(dim=1).tolist()
    return [
        policy.vocabulary.text(ids[:length])
        for ids, length in zip(rollout.response_ids.tolist(), lengths, strict=True)
    ]


def samples_of(policy: TokenLM, tokenizer: ImageTokenizer, rollout: Rollout) -> list[Sample]:
    """Turn B token rows into what a reward sees: a picture and the words that go with it."""
    direction = rollout.prompts[0].direction
    prompts = [prompt for prompt in rollout.prompts for _ in range(rollout.group_size)]
    if direction == "image":
        codes = rollout.response_ids - policy.vocabulary.grid.offset
        pictures = list(uint8_from_pixels(tokenizer.decode(codes)))
        captions = [prompt.caption for prompt in prompts]
    else:
        pictures = [_picture(prompt) for prompt in prompts]
        captions = response_texts(policy, rollout)
    return [
        Sample(key=prompt.key, direction=direction, caption=caption, image=picture, target=prompt.caption)
        for prompt, caption, picture in zip(prompts, captions, pictures, strict=True)
    ]


def score_tokens(policy: TokenLM, rollout: Rollout) -> PolicyOutput:
    """Run the policy, or the reference, over a rollout's tokens as they were sampled."""
    output: PolicyOutput = policy(
        rollout.input_ids,
        rollout.attention_mask,
        prompt_length=rollout.prompt_length,
        direction=rollout.prompts[0].direction,
        temperature=rollout.temperature,
    )
    return output


@torch.no_grad()
def make_experience(
    accelerator: Accelerator,
    policy: TokenLM,
    reference: TokenLM,
    rollouts: Sequence[Rollout],
    scores: Sequence[Scores],
    stage: Stage,
    *,
    kl_coef: float,
) -> tuple[list[Experience], list[PolicyOutput]]:
    """Spread scores over tokens as the stage's algorithm does; moments are those of all ranks.

    A response that reached the length limit counts as ended (the limit is part of the task), so nothing is
    bootstrapped. Rows without a score leave the loss and the statistics.

    Returns:
        One experience per rollout, and what the policy says of the rollout's tokens before the update, from
        which the caller can tell how far trainer and engine agree.

    Raises:
        RewardError: If no sample of any rank has a score, or their number is not that of the samples.
    """
    algorithm = ALGORITHMS[stage.algorithm]
    penalty = kl_coef if kl_place(stage) == "reward" else 0.0
    outputs = [score_tokens(policy, rollout) for rollout in rollouts]
    parts: list[tuple[Tensor, Tensor, Credit]] = []
    for rollout, output, score in zip(rollouts, outputs, scores, strict=True):
        if len(score.total) != len(rollout.input_ids):
            raise RewardError(
                f"the reward gave {len(score.total)} scores for {len(rollout.input_ids)} samples"
            )
        ref_logprobs = score_tokens(reference, rollout).logprobs
        total = torch.from_numpy(score.total).float().to(ref_logprobs.device)
        total = total + _length_charge(rollout, stage)
        mask = scored_mask(rollout.response_mask, total)
        rolled_out = RolledOut(
            rewards=kl_penalty_rewards(total, rollout.old_logprobs, ref_logprobs, mask, penalty),
            values=output.values,
            mask=mask,
            is_scored=~total.isnan(),
            group_size=rollout.group_size,
        )
        parts.append((ref_logprobs, mask, algorithm.credit(rolled_out, stage)))
    moments = global_moments(
        accelerator,
        torch.cat([credit.advantages.flatten() for _, _, credit in parts])[None],
        torch.cat([mask.flatten() for _, mask, _ in parts])[None],
    )
    if not moments.count:
        raise RewardError("no sample of this step could be scored, so there is nothing to learn from")
    experiences = [
        Experience(
            rollout=rollout,
            scores=score,
            ref_logprobs=ref_logprobs,
            old_values=output.values,
            loss_mask=mask,
            advantages=whiten(credit.advantages, mask, moments=moments)
            if algorithm.whitens
            else credit.advantages,
            returns=credit.returns,
        )
        for rollout, output, score, (ref_logprobs, mask, credit) in zip(
            rollouts, outputs, scores, parts, strict=True
        )
    ]
    return experiences, outputs


def _length_charge(rollout: Rollout, stage: Stage) -> Tensor | float:
    """What is added to the scores (B,) of texts that come near the length limit."""
    if not stage.overlong_buffer or stage.direction == "image":
        return 0.0
    return overlong_penalty(
        rollout.response_mask.sum(dim=1),
        max_length=stage.max_words,
        buffer_length=stage.overlong_buffer,
        factor=stage.overlong_factor,
    )


def _picture(prompt: Prompt) -> np.ndarray:
    if prompt.image is None:
        raise ConfigError(
            f"{prompt.key}: a prompt that is answered with text needs its picture for the reward"
        )
    return prompt.image
