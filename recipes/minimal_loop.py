"""Reinforcement learning of a policy from top to bottom: one process, plain torch, nothing hidden.

    python -m recipes.minimal_loop [--algorithm ppo] [--direction image] [--steps 30] [--run runs/minimal]

Each step does four things: write a group of responses to every prompt, score them, work out how much each
token earned, and take a few optimizer steps. `unirl.trainer` does the same with the same functions out of
`unirl.algorithms` and adds what long runs need: ranks, stages, resume, metrics, alarms. Both come to the same
samples and the same weights, and a test holds them to it.

Axes: P prompts, G responses to each, B = P x G rows, L tokens of the padded prompt, T of the response.
"""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from recipes.shapes import shapes
from storage import FeatureStore
from unirl.algorithms import (
    gae,
    group_advantages,
    kl_k1,
    kl_loss,
    kl_penalty_rewards,
    learning_rate_factor,
    policy_loss,
    sample_tokens,
    scored_mask,
    sequence_mean_weights,
    spread_to_tokens,
    value_loss,
    whiten,
)
from unirl.policies.image_tokenizer import ImageTokenizer, uint8_from_pixels
from unirl.policies.policy import Policy, PolicyOutput, left_pad
from unirl.policies.token_lm import TokenLM
from unirl.rewards import load_reward
from unirl.rollout.engine import sample_uniforms
from unirl.trainer.prepare import prepare_run
from unirl.trainer.prompts import PromptSource, all_prompts
from unirl.types import Direction, Prompt, Reward, Sample

__all__ = ["Settings", "train"]

log = logging.getLogger("recipes.minimal_loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is learned and how fast. Each field means what it means in `unirl.trainer.stages.Stage`."""

    algorithm: Literal["ppo", "grpo"] = "ppo"
    direction: Direction = "image"
    steps: int = 30
    prompts_per_step: int = 16
    group_size: int = 8
    max_words: int = 8
    updates_per_step: int = 2
    learning_rate: float = 2e-4
    critic_learning_rate: float = 2e-3
    warmup_steps: int = 10
    max_grad_norm: float = 1.0
    gamma: float = 1.0
    lam: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.2
    value_clip: float = 0.2
    kl_coef: float = 0.02


class Responses(NamedTuple):
    """B responses behind their prompts; prompts are padded on the left, responses on the right."""

    ids: Tensor
    """int64 (B, L + T)."""
    mask: Tensor
    """bool (B, L + T), True on real tokens."""
    logprobs: Tensor
    """float32 (B, T), nats, of each token when it was drawn."""


class Experience(NamedTuple):
    """Responses with all that the update needs. The first axis of every tensor is B."""

    ids: Tensor
    mask: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor
    """bool (B, T), True on response tokens of rows that could be scored."""


def train(
    policy: Policy,
    tokenizer: ImageTokenizer,
    reward: Reward,
    batches: Iterable[Sequence[Prompt]],
    settings: Settings,
    *,
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Train a policy in place; yields the metrics of each step when it is done.

    Args:
        policy: As it is now, it also becomes the frozen reference.
        tokenizer: Turns drawn codes into the pictures that are scored.
        reward: What is learned from.
        batches: P prompts for each step.
        settings: Algorithm and coefficients.
        seed: Of the random numbers that tokens are drawn with.
    """
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": list(policy.lm.parameters())}, {"params": list(policy.critic.parameters())}],
        lr=0.0,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    rates = (settings.learning_rate, settings.critic_learning_rate)
    total = max(settings.steps, settings.warmup_steps)
    for step, prompts in zip(range(settings.steps), batches):
        factor = learning_rate_factor(step, warmup_steps=settings.warmup_steps, total_steps=total)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = factor * rate
        responses = write_responses(policy, prompts, settings, seed=(seed, step + 1))
        scores = reward.score(finished_samples(policy, tokenizer, prompts, responses, settings)).total
        experience = give_credit(policy, reference, responses, torch.from_numpy(scores).float(), settings)
        rows_PG = torch.arange(len(scores)).view(-1, settings.group_size)
        for first in range(settings.updates_per_step):
            rows = rows_PG[first :: settings.updates_per_step].flatten()
            loss = loss_of(policy, Experience(*(tensor[rows] for tensor in experience)), settings)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
        divergence = kl_k1(experience.old_logprobs, experience.ref_logprobs)[experience.loss_mask]
        yield {"reward/mean": float(np.nanmean(scores)), "kl/reference": float(divergence.mean())}


@torch.no_grad()
def write_responses(
    policy: Policy, prompts: Sequence[Prompt], settings: Settings, *, seed: tuple[int, ...]
) -> Responses:
    """Sample G responses to each prompt, one token of all rows at a time."""
    group, pad, eos = settings.group_size, policy.vocabulary.pad, policy.vocabulary.eos
    length = policy.max_response_length(settings.direction, settings.max_words)
    ids, mask = left_pad([policy.prompt_ids(prompt) for prompt in prompts], pad)
    ids, mask = ids.repeat_interleave(group, dim=0), mask.repeat_interleave(group, dim=0)
    # Row g of prompt p has random numbers of its own, whatever else is in the batch.
    streams = [sample_uniforms((*seed, p), group, length) for p in range(len(prompts))]
    uniforms = torch.from_numpy(np.concatenate(streams))
    going = torch.ones(len(ids), dtype=torch.bool)
    logprobs: list[Tensor] = []
    cache, new = DynamicCache(), ids
    for t in range(length):
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -new.shape[1] :]
        hidden = policy.backbone(policy.embed(new), attention_mask=mask, positions=positions, cache=cache)
        drawn, logprob = sample_tokens(
            policy.logits(hidden[:, -1], settings.direction),
            uniforms=uniforms[:, t],
            allowed=policy.allowed_at(settings.direction, t),
        )
        new = torch.where(going, drawn, pad)[:, None]
        ids, mask = torch.cat([ids, new], dim=1), torch.cat([mask, going[:, None]], dim=1)
        logprobs.append(torch.where(going, logprob, 0.0).float())
        if settings.direction == "text":
            going = going & (drawn != eos)
    return Responses(ids, mask, torch.stack(logprobs, dim=1))


def finished_samples(
    policy: Policy,
    tokenizer: ImageTokenizer,
    prompts: Sequence[Prompt],
    responses: Responses,
    settings: Settings,
) -> list[Sample]:
    """What a reward sees of B responses: a picture and the words that go with it."""
    shown = [prompt for prompt in prompts for _ in range(settings.group_size)]
    written = responses.ids[:, -responses.logprobs.shape[1] :]
    if settings.direction == "image":
        pictures = list(uint8_from_pixels(tokenizer.decode(policy.vocabulary.codes(written))))
        captions = [prompt.caption for prompt in shown]
    else:
        pictures = [np.asarray(prompt.image) for prompt in shown]
        captions = [policy.vocabulary.text(ids) for ids in written.tolist()]
    return [
        Sample(key=p.key, direction=settings.direction, caption=words, image=picture, target=p.caption)
        for p, words, picture in zip(shown, captions, pictures, strict=True)
    ]


@torch.no_grad()
def give_credit(
    policy: Policy, reference: Policy, responses: Responses, scores_B: Tensor, settings: Settings
) -> Experience:
    """Turn one score a response into an advantage for each of its tokens."""
    ids, mask, old_logprobs = responses
    length = old_logprobs.shape[1]
    ref_logprobs = score_tokens(reference, ids, mask, length, settings).logprobs
    values = score_tokens(policy, ids, mask, length, settings).values
    loss_mask = scored_mask(mask[:, -length:], scores_B)
    if settings.algorithm == "ppo":
        # The KL penalty is part of the reward, and the critic says what was to be expected.
        rewards = kl_penalty_rewards(scores_B, old_logprobs, ref_logprobs, loss_mask, settings.kl_coef)
        advantages, returns = gae(rewards, values, loss_mask, gamma=settings.gamma, lam=settings.lam)
        advantages = whiten(advantages, loss_mask)
    else:
        # The other responses to the prompt say what was to be expected.
        advantages_B = group_advantages(scores_B.view(-1, settings.group_size)).flatten()
        advantages, returns = spread_to_tokens(advantages_B, loss_mask), values
    return Experience(ids, mask, old_logprobs, ref_logprobs, values, advantages, returns, loss_mask)


def score_tokens(policy: Policy, ids: Tensor, mask: Tensor, length: int, settings: Settings) -> PolicyOutput:
    """Log-probs and values (B, T) of given responses, in one forward pass."""
    output: PolicyOutput = policy(
        ids, mask, prompt_length=ids.shape[1] - length, direction=settings.direction
    )
    return output


def loss_of(policy: Policy, rows: Experience, settings: Settings) -> Tensor:
    """Return the loss of one update, 0-d."""
    mask, num_tokens = rows.loss_mask, max(int(rows.loss_mask.sum()), 1)
    output = score_tokens(policy, rows.ids, rows.mask, mask.shape[1], settings)
    by_response = settings.algorithm == "grpo"
    loss, _ = policy_loss(
        output.logprobs,
        rows.old_logprobs,
        rows.advantages,
        mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        weights_BT=sequence_mean_weights(mask) if by_response else None,
        denominator=max(int(mask.any(dim=1).sum()), 1) if by_response else num_tokens,
    )
    if settings.algorithm == "ppo":
        critic, _ = value_loss(
            output.values,
            rows.old_values,
            rows.returns,
            mask,
            clip=settings.value_clip,
            denominator=num_tokens,
        )
        return loss + critic
    divergence, _ = kl_loss(output.logprobs, rows.ref_logprobs, mask, estimator="k3", denominator=num_tokens)
    return loss + settings.kl_coef * divergence


def main() -> None:
    """Warm a small policy up on scenes of coloured shapes, train it, and ask a judge that is no reward."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", choices=("ppo", "grpo"), default="ppo")
    parser.add_argument("--direction", choices=get_args(Direction), default="image")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, default=Path("runs/minimal"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    recipe, models = shapes(seed=options.seed), options.run / "models"
    prepare_run(recipe, options.run, seed=options.seed)
    settings = Settings(algorithm=options.algorithm, direction=options.direction, steps=options.steps)
    policy = TokenLM.load(models / "sft")
    tokenizer, reward = ImageTokenizer.load(models / "tokenizer"), load_reward(models / "reward")
    store, judge = FeatureStore.open(options.run / "store"), recipe.data.judge(seed=options.seed)
    side, direction = tokenizer.image_size, settings.direction
    source = PromptSource(
        store.select("split = 'rl'"),
        direction,
        image_size=side,
        prompts_per_step=settings.prompts_per_step,
        seed=options.seed,
    )
    held_out = all_prompts(store.select(recipe.evaluation_rows), direction, image_size=side)

    def judged() -> float:
        """Share of responses to held-out prompts that the judge accepts."""
        responses = write_responses(policy, held_out, settings, seed=(options.seed, 0))
        samples = finished_samples(policy, tokenizer, held_out, responses, settings)
        return float(np.nanmean(judge.judge(samples)))

    before = judged()
    batches = (source.next() for _ in range(settings.steps))
    for step, metrics in enumerate(train(policy, tokenizer, reward, batches, settings, seed=options.seed), 1):
        log.info("step %d: reward %.3f, kl %.4f", step, metrics["reward/mean"], metrics["kl/reference"])
    source.close()
    log.info("the judge accepts %.1f%% on held-out prompts, %.1f%% before", 100 * judged(), 100 * before)


if __name__ == "__main__":
    main()
