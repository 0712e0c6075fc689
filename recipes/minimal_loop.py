"""Reinforcement learning of a policy from top to bottom: one process, plain torch, nothing hidden.

    python -m recipes.minimal_loop [--algorithm ppo] [--direction image] [--steps 30] [--run runs/minimal]

`unirl.trainer` does the same with the same functions out of `unirl.algorithms` and adds what long runs need:
ranks, stages, resume, metrics, alarms. A test holds both to the same samples and the same weights.

Axes: P prompts, G responses to each, B = P x G rows, L tokens of the padded prompt, T of the response.
"""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from recipes.shapes import shapes
from storage import FeatureStore
from unirl import algorithms
from unirl.policies.image_tokenizer import ImageTokenizer, uint8_from_pixels
from unirl.policies.padding import left_pad, token_positions
from unirl.policies.policy import Policy, PolicyOutput
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


class Experience(NamedTuple):
    """Responses behind their prompts, with all that the update needs. The first axis of every tensor is B."""

    ids: Tensor  # int64 (B, L + T); prompts are padded on the left, responses on the right
    mask: Tensor  # bool (B, L + T), True on real tokens
    loss_mask: Tensor  # bool (B, T), True on response tokens of rows that could be scored
    old_logprobs: Tensor  # float32 (B, T), nats, of each token when it was drawn
    ref_logprobs: Tensor  # (B, T), of the reference
    old_values: Tensor  # (B, T), what the critic expects before each token; so are the next two
    advantages: Tensor
    returns: Tensor


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
    actor = {"params": policy.lm.parameters(), "lr": settings.learning_rate}
    critic = {"params": policy.critic.parameters(), "lr": settings.critic_learning_rate}
    optimizer = torch.optim.AdamW([actor, critic], betas=(0.9, 0.95), weight_decay=0.0)
    warmup, total = settings.warmup_steps, max(settings.steps, settings.warmup_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(algorithms.learning_rate_factor, warmup_steps=warmup, total_steps=total)
    )
    for step, prompts in zip(range(1, settings.steps + 1), batches):
        ids, mask, logprobs = write_responses(policy, prompts, settings, seed=(seed, step))
        scores = reward.score(finished_samples(policy, tokenizer, prompts, ids, settings)).total
        scores_B = torch.from_numpy(scores).float()
        experience = give_credit(policy, reference, ids, mask, logprobs, scores_B, settings)
        rows_PG = torch.arange(len(ids)).view(-1, settings.group_size)
        for first in range(settings.updates_per_step):
            rows = rows_PG[first :: settings.updates_per_step].flatten()
            loss = loss_of(policy, Experience(*(tensor[rows] for tensor in experience)), settings)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
        schedule.step()
        divergence = algorithms.kl_k1(logprobs, experience.ref_logprobs)[experience.loss_mask].mean()
        yield {"reward/mean": float(np.nanmean(scores)), "kl/reference": float(divergence)}


@torch.no_grad()
def write_responses(
    policy: Policy, prompts: Sequence[Prompt], settings: Settings, *, seed: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample G responses to each prompt, one token of all rows at a time; returns ids, mask and log-probs."""
    group, pad = settings.group_size, policy.vocabulary.pad
    length = policy.max_response_length(settings.direction, settings.max_words)
    ids, mask = left_pad([policy.prompt_ids(prompt) for prompt in prompts], pad)
    ids, mask = ids.repeat_interleave(group, dim=0), mask.repeat_interleave(group, dim=0)
    # Row g of prompt p has random numbers of its own, whatever else is in the batch.
    streams = [sample_uniforms((*seed, p), group, length) for p in range(len(prompts))]
    uniforms = torch.from_numpy(np.concatenate(streams))
    going, cache, new = torch.ones(len(ids), dtype=torch.bool), DynamicCache(), ids
    logprobs: list[Tensor] = []
    for t in range(length):
        positions = token_positions(mask)[:, -new.shape[1] :]
        hidden = policy.backbone(policy.embed(new), attention_mask=mask, positions=positions, cache=cache)
        logits = policy.logits(hidden[:, -1], settings.direction)
        allowed = policy.allowed_at(settings.direction, t)
        drawn, logprob = algorithms.sample_tokens(logits, uniforms=uniforms[:, t], allowed=allowed)
        new = torch.where(going, drawn, pad)[:, None]
        ids, mask = torch.cat([ids, new], dim=1), torch.cat([mask, going[:, None]], dim=1)
        logprobs.append(torch.where(going, logprob, 0.0).float())
        if settings.direction == "text":
            going = going & (drawn != policy.vocabulary.eos)
    return ids, mask, torch.stack(logprobs, dim=1)


def finished_samples(
    policy: Policy, tokenizer: ImageTokenizer, prompts: Sequence[Prompt], ids: Tensor, settings: Settings
) -> list[Sample]:
    """What a reward sees of B responses: a picture and the words that go with it."""
    written = ids[:, -policy.max_response_length(settings.direction, settings.max_words) :]
    shown = [prompt for prompt in prompts for _ in range(settings.group_size)]
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
    policy: Policy,
    reference: Policy,
    ids: Tensor,
    mask: Tensor,
    logprobs: Tensor,
    scores_B: Tensor,
    settings: Settings,
) -> Experience:
    """Turn one score a response into an advantage for each of its tokens."""
    ref_logprobs = score_tokens(reference, ids, mask, settings).logprobs
    values = score_tokens(policy, ids, mask, settings).values
    loss_mask = algorithms.scored_mask(mask[:, -logprobs.shape[1] :], scores_B)
    if settings.algorithm == "ppo":
        # The KL penalty is part of the reward, and the critic says what was to be expected.
        rewards = algorithms.kl_penalty_rewards(scores_B, logprobs, ref_logprobs, loss_mask, settings.kl_coef)
        advantages, returns = algorithms.gae(
            rewards, values, loss_mask, gamma=settings.gamma, lam=settings.lam
        )
        advantages = algorithms.whiten(advantages, loss_mask)
    else:
        # The other responses to the prompt say what was to be expected.
        advantages_PG = algorithms.group_advantages(scores_B.view(-1, settings.group_size))
        advantages, returns = algorithms.spread_to_tokens(advantages_PG.flatten(), loss_mask), values
    return Experience(ids, mask, loss_mask, logprobs, ref_logprobs, values, advantages, returns)


def score_tokens(policy: Policy, ids: Tensor, mask: Tensor, settings: Settings) -> PolicyOutput:
    """Log-probs and values (B, T) of given responses, in one forward pass."""
    length = policy.max_response_length(settings.direction, settings.max_words)
    output: PolicyOutput = policy(
        ids, mask, prompt_length=ids.shape[1] - length, direction=settings.direction
    )
    return output


def loss_of(policy: Policy, rows: Experience, settings: Settings) -> Tensor:
    """Return the loss of one update, 0-d: GRPO averages over responses, all else over tokens."""
    mask, by_response = rows.loss_mask, settings.algorithm == "grpo"
    num_tokens, num_responses = int(mask.sum()), int(mask.any(dim=1).sum())
    output = score_tokens(policy, rows.ids, rows.mask, settings)
    loss, _ = algorithms.policy_loss(
        output.logprobs,
        rows.old_logprobs,
        rows.advantages,
        mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        weights_BT=algorithms.sequence_mean_weights(mask) if by_response else None,
        denominator=max(num_responses if by_response else num_tokens, 1),
    )
    if settings.algorithm == "ppo":
        values = (output.values, rows.old_values, rows.returns, mask)
        other, _ = algorithms.value_loss(*values, clip=settings.value_clip, denominator=max(num_tokens, 1))
        return loss + other
    divergence, _ = algorithms.kl_loss(
        output.logprobs, rows.ref_logprobs, mask, estimator="k3", denominator=max(num_tokens, 1)
    )
    return loss + settings.kl_coef * divergence


def main() -> None:
    """Warm a small policy up on scenes of coloured shapes, train it, and ask a judge that is no reward."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", choices=("ppo", "grpo"), default="ppo")
    parser.add_argument("--direction", choices=("text", "image"), default="image")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, default=Path("runs/minimal"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = Settings(algorithm=options.algorithm, direction=options.direction, steps=options.steps)
    recipe, models, seed = shapes(seed=options.seed), options.run / "models", options.seed
    prepare_run(recipe, options.run, seed=seed)
    policy, tokenizer = TokenLM.load(models / "sft"), ImageTokenizer.load(models / "tokenizer")
    store, side = FeatureStore.open(options.run / "store"), tokenizer.image_size
    held_out = all_prompts(store.select(recipe.evaluation_rows), settings.direction, image_size=side)
    view, count = store.select("split = 'rl'"), settings.prompts_per_step
    source = PromptSource(view, settings.direction, image_size=side, prompts_per_step=count, seed=seed)

    def judged() -> float:
        """Share of responses to held-out prompts that the judge accepts."""
        ids, _, _ = write_responses(policy, held_out, settings, seed=(seed, 0))
        samples = finished_samples(policy, tokenizer, held_out, ids, settings)
        return float(np.nanmean(recipe.data.judge(seed=seed).judge(samples)))

    log.info("the judge accepts %.1f%% on held-out prompts", 100 * judged())
    batches, reward = iter(source.next, None), load_reward(models / "reward")
    for step, found in enumerate(train(policy, tokenizer, reward, batches, settings, seed=seed), start=1):
        log.info("step %d: reward %.3f, kl %.4f", step, found["reward/mean"], found["kl/reference"])
    source.close()
    log.info("the judge accepts %.1f%% now", 100 * judged())


if __name__ == "__main__":
    main()
