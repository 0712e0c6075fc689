"""Supervised warm-up: the policy learns both directions from pictures with captions, before any reward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unirl.algorithms.masking import masked_sum
from unirl.algorithms.muon import Muon
from unirl.algorithms.schedule import learning_rate_factor
from unirl.policies.padding import left_pad
from unirl.policies.policy import Policy
from unirl.types import Direction, Prompt

__all__ = ["SupervisedReport", "supervised_batch", "train_supervised"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedReport:
    """Mean loss per token, nats, over the last tenth of the steps."""

    steps: int
    text_loss: float
    image_loss: float


def supervised_batch(
    policy: Policy, prompts: Sequence[Prompt], *, unconditional: int = 0
) -> tuple[Tensor, Tensor, int, Tensor]:
    """Lay out prompts with their true responses; the last `unconditional` ones without their conditions.

    Returns:
        int64 (B, L + T) ids, bool (B, L + T) attention mask, L, and bool (B, T), True on response tokens.
    """
    first = len(prompts) - unconditional
    rows = [policy.prompt_ids(prompt) for prompt in prompts[:first]]
    rows += [policy.unconditional_ids(prompt) for prompt in prompts[first:]]
    ids, mask = left_pad(rows, policy.vocabulary.pad)
    responses = [torch.tensor(policy.response_ids(prompt)) for prompt in prompts]
    padded = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=policy.vocabulary.pad)
    lengths = torch.tensor([len(response) for response in responses])
    response_mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return (
        torch.cat([ids, padded], dim=1).to(policy.device),
        torch.cat([mask, response_mask], dim=1).to(policy.device),
        ids.shape[1],
        response_mask.to(policy.device),
    )


def train_supervised(
    policy: Policy,
    batches: Iterable[Sequence[Prompt]],
    *,
    steps: int,
    text_fraction: float = 0.125,
    unconditional_fraction: float = 0.0,
    learning_rate: float = 2e-3,
    weight_decay: float = 0.05,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> SupervisedReport:
    """Train on pairs of picture and caption: all of a batch to draw, a part of it to describe.

    Args:
        policy: Trained in place. The critic is not touched.
        batches: Endless batches of prompts that carry caption and codes; their direction does not matter.
        steps: Optimizer steps.
        text_fraction: Share of each batch that is also learnt from picture to words. A caption is a few easy
            tokens behind a long prompt: a small share costs little and suffices.
        unconditional_fraction: Share of each batch that is drawn without its caption. Guidance contrasts with
            such drawings, so it needs a policy that has learnt them; 0.1 is usual.
        learning_rate: Peak of Muon and AdamW alike, after a warm-up over the first twentieth, cosine to a
            twentieth.
        weight_decay: Of both.
        on_step: Called with (step, loss) after each step; the loss is the sum of both directions' means.
    """
    optimizers = _optimizers(policy, learning_rate, weight_decay)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: learning_rate_factor(
                step, warmup_steps=max(steps // 20, 1), total_steps=steps, decay="cosine", floor=0.05
            ),
        )
        for optimizer in optimizers
    ]
    tail: dict[Direction, list[float]] = {"text": [], "image": []}
    for step, prompts in zip(range(steps), batches, strict=False):
        described = prompts[: max(round(text_fraction * len(prompts)), 1)]
        losses = {
            "text": _loss(policy, described, "text"),
            "image": _loss(
                policy, prompts, "image", unconditional=round(unconditional_fraction * len(prompts))
            ),
        }
        loss = losses["text"] + losses["image"]
        policy.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.lm.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step >= steps - max(steps // 10, 1):
            for direction, values in tail.items():
                values.append(float(losses[direction].detach()))
        on_step(step, float(loss.detach()))
    return SupervisedReport(
        steps=steps,
        text_loss=sum(tail["text"]) / len(tail["text"]),
        image_loss=sum(tail["image"]) / len(tail["image"]),
    )


def _optimizers(policy: Policy, learning_rate: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, AdamW for the rest."""
    ends = {id(policy.lm.get_input_embeddings().weight), id(policy.lm.get_output_embeddings().weight)}
    matrices = [p for p in policy.trained_parameters() if p.ndim == 2 and id(p) not in ends]
    inside = {id(p) for p in matrices}
    others = [p for p in policy.trained_parameters() if id(p) not in inside]
    return [
        Muon(matrices, learning_rate=learning_rate, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay),
    ]


def _loss(
    policy: Policy, prompts: Sequence[Prompt], direction: Direction, *, unconditional: int = 0
) -> Tensor:
    turned = [replace(prompt, direction=direction) for prompt in prompts]
    ids, mask, prompt_length, response_mask = supervised_batch(policy, turned, unconditional=unconditional)
    output = policy(
        ids,
        mask,
        prompt_length=prompt_length,
        direction=direction,
        pictures=policy.pictures(turned[: len(turned) - unconditional]),
    )
    return -masked_sum(output.logprobs, response_mask) / response_mask.sum()
