"""One update phase: the clipped policy and value losses over a rollout, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from unirl.algorithms import add_metrics, kl_loss, masked_sum, value_loss
from unirl.policies.policy import Policy, PolicyOutput
from unirl.trainer.algorithms import ALGORITHMS, kl_place, loss_count, loss_weights
from unirl.trainer.distributed import global_count
from unirl.trainer.mismatch import require_support
from unirl.trainer.replay import replay_tokens
from unirl.trainer.row_batches import budgeted_batches, every_nth_prompt
from unirl.trainer.sft import supervised_batch
from unirl.trainer.stages import Stage
from unirl.trainer.step_metrics import agreement_metrics
from unirl.types import Direction, Experience, Prompt

__all__ = ["update_policy"]


def update_policy(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    experiences: Sequence[Experience],
    stage: Stage,
    *,
    kl_coef: float | None = None,
    replay: Sequence[Prompt] = (),
    micro_batch_tokens: int = 0,
    critic_only: bool = False,
    with_agreement: bool = False,
) -> dict[str, Tensor]:
    """Take `stage.epochs` x `stage.updates_per_step` optimizer steps.

    Update u takes prompts u, u + n, u + 2n, ... of every experience, so that it sees the same samples
    whatever the number of ranks. The policy loss is divided by what the algorithm averages over, everything
    else by the tokens of the whole update, over all ranks.

    Args:
        accelerator: Averages gradients over ranks.
        model: The policy as `accelerator.prepare` returned it.
        optimizer: As `accelerator.prepare` returned it.
        experiences: This rank's share, one for each micro-batch.
        stage: Algorithm and coefficients.
        kl_coef: Weight of the penalty, where the stage has it in the loss; None takes the stage's, for each
            modality.
        replay: This rank's captioned pictures in the direction that the stage does not train; their
            supervised loss is added, against forgetting.
        micro_batch_tokens: Rows of all ranks are dealt out and packed into micro-batches of so many tokens;
            0 takes each experience as one.
        critic_only: Fit the critic and leave the policy, its optimizer's state too, as it is.
        with_agreement: Tell, too, how far engine and trainer agree, as a forward pass before the update
            would; there must be one update only.

    Returns:
        Metric sums of this rank, see `unirl.algorithms.add_metrics`.

    Raises:
        RolloutError: With `with_agreement`, if a sampled token has no probability at all.
    """
    metrics: list[Mapping[str, Tensor]] = []
    updates = [
        _micro_batches(accelerator, model, experiences, first, stage, micro_batch_tokens)
        for first in range(stage.updates_per_step)
    ]
    for _ in range(stage.epochs):
        for first, batches in enumerate(updates):
            counts = {d: _count(accelerator, batches, stage, d) for d in stage.directions}
            optimizer.zero_grad(set_to_none=True)
            if replay and not critic_only:
                with accelerator.no_sync(model):
                    metrics.append(
                        _replay(accelerator, model, replay[first :: stage.updates_per_step], stage)
                    )
            for i, batch in enumerate(batches):
                last = i + 1 == len(batches)
                with nullcontext() if last else accelerator.no_sync(model):
                    metrics.append(
                        _backward(
                            accelerator, model, batch, stage, counts, kl_coef, critic_only, with_agreement
                        )
                    )
            if critic_only:
                _drop_gradients(accelerator.unwrap_model(model).trained_parameters())
            norm = accelerator.clip_grad_norm_(model.parameters(), stage.max_grad_norm)
            metrics.append({"policy/grad_norm_max": torch.as_tensor(norm).detach().double()})
            optimizer.step()
    return add_metrics(metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What losses of one update and modality are divided by, over all micro-batches and ranks."""

    loss: float
    """For the policy loss: tokens, responses, or rows times the length limit."""
    tokens: float
    """For everything else."""


def _micro_batches(
    accelerator: Accelerator,
    model: nn.Module,
    experiences: Sequence[Experience],
    first: int,
    stage: Stage,
    tokens: int,
) -> list[Experience]:
    """What one update learns from, in the parts that go through the model at once."""
    picked = [every_nth_prompt(experience, first, stage.updates_per_step) for experience in experiences]
    if not tokens:
        return picked
    policy: Policy = accelerator.unwrap_model(model)
    return budgeted_batches(accelerator, picked, tokens=tokens, width=policy.decoder_config.hidden_size)


def _count(
    accelerator: Accelerator, batches: Sequence[Experience], stage: Stage, direction: Direction
) -> Counts:
    own, masks = stage.of(direction), [b.loss_mask for b in batches if b.rollout.direction == direction]
    none = torch.zeros((0, 1), dtype=torch.bool, device=accelerator.device)
    return Counts(
        loss=_global_sum(accelerator, [loss_count(own, mask) for mask in masks or [none]]),
        tokens=_global_sum(accelerator, masks or [none]),
    )


def _backward(
    accelerator: Accelerator,
    model: nn.Module,
    batch: Experience,
    stage: Stage,
    counts: Mapping[Direction, Counts],
    kl_coef: float | None,
    critic_only: bool,
    with_agreement: bool,
) -> dict[str, Tensor]:
    direction = batch.rollout.direction
    own, count = stage.of(direction), counts[direction]
    output = replay_tokens(
        model,
        accelerator.unwrap_model(model),
        batch.rollout,
        stage.sampling,
        detach_uncond=stage.guidance_mode == "detach_uncond",
        entropy_gradient=own.entropy_coef != 0.0,
        with_values=ALGORITHMS[own.algorithm].uses_critic,
    )
    agreement: dict[str, Tensor] = {}
    if with_agreement:
        require_support(output, batch.rollout, batch.loss_mask)
        agreement = agreement_metrics(batch, output, stage)
    policy, metrics = _policy_loss(output, batch, own, count, own.kl_coef if kl_coef is None else kl_coef)
    critic, critic_metrics = _critic_loss(output, batch, own, count)
    # Ranks wait for a gradient of every parameter: what is not trained has one of zero.
    loss = (0.0 * policy if critic_only else policy) + critic
    # Ranks average their gradients; the denominators already count what all of them hold.
    accelerator.backward(stage.loss_weight(direction) * loss * accelerator.num_processes)
    return agreement | critic_metrics | ({} if critic_only else metrics)


def _policy_loss(
    output: PolicyOutput, batch: Experience, stage: Stage, count: Counts, kl_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The algorithm's loss, the divergence where it is charged there, less the entropy bonus."""
    mask = batch.loss_mask
    loss, metrics = ALGORITHMS[stage.algorithm].loss(
        output.logprobs,
        batch.old_logprobs,
        batch.advantages,
        mask,
        stage,
        denominator=count.loss,
        weights_BT=_token_weights(batch, stage),
    )
    if kl_place(stage) == "loss" and batch.ref_logprobs is not None:
        divergence, _ = kl_loss(
            output.logprobs,
            batch.ref_logprobs,
            mask,
            estimator=stage.kl_estimator,
            denominator=count.tokens,
            gradient_from_k2=stage.kl_straight_through,
        )
        loss = loss + kl_coef * divergence
        metrics["policy/kl_loss_sum"] = divergence.detach().double() * count.tokens
    entropy = masked_sum(output.entropy, mask)
    loss = loss - stage.entropy_coef * entropy / count.tokens
    return loss, {**metrics, "policy/entropy_sum": entropy.detach().double()}


def _critic_loss(
    output: PolicyOutput, batch: Experience, stage: Stage, count: Counts
) -> tuple[Tensor, dict[str, Tensor]]:
    """The regression to returns; a zero with a gradient where the algorithm has no critic."""
    if not ALGORITHMS[stage.algorithm].uses_critic:
        return 0.0 * output.values.sum(), {}
    return value_loss(
        output.values,
        batch.old_values,
        batch.returns,
        batch.loss_mask,
        clip=stage.value_clip,
        denominator=count.tokens,
    )


def _drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """An optimizer passes over parameters without a gradient, moments and step count included."""
    for parameter in parameters:
        parameter.grad = None


def _token_weights(batch: Experience, stage: Stage) -> Tensor | None:
    """What the algorithm averages with, times the importance of each token."""
    weights = loss_weights(stage, batch.loss_mask)
    if batch.importance is None or weights is None:
        return weights if batch.importance is None else batch.importance
    return weights * batch.importance


def _global_sum(accelerator: Accelerator, parts: Sequence[Tensor]) -> float:
    return global_count(accelerator, torch.cat([part.flatten() for part in parts]))


def _replay(
    accelerator: Accelerator, model: nn.Module, prompts: Sequence[Prompt], stage: Stage
) -> dict[str, Tensor]:
    """Add the gradient of the supervised loss, per token over all ranks."""
    policy: Policy = accelerator.unwrap_model(model)
    ids, attention, prompt_length, mask = supervised_batch(policy, prompts)
    output = model(
        ids,
        attention,
        prompt_length=prompt_length,
        direction=prompts[0].direction,
        pictures=policy.pictures(prompts),
    )
    loss = -masked_sum(output.logprobs, mask)
    denominator = global_count(accelerator, mask)
    accelerator.backward(stage.replay_coef * loss / denominator * accelerator.num_processes)
    return {"replay/loss_sum": loss.detach().double(), "replay/tokens": mask.sum().double()}
