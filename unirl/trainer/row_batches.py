"""Rows of rollouts and experiences: taken out, put together with other padding, moved between ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from unirl.policies.policy import Policy, PolicyOutput
from unirl.trainer.distributed import gather_rows
from unirl.trainer.micro_batches import RowLength, deal_rows, pack_rows, row_cost
from unirl.trainer.replay import replay_tokens
from unirl.types import Direction, Experience, Rollout, SamplingSettings, Scores, TokenOrigin

__all__ = [
    "budgeted_batches",
    "every_nth_prompt",
    "join_experiences",
    "join_rollouts",
    "move_rollout",
    "replay_rollouts",
    "row_lengths",
    "take_experience",
    "take_rollout",
    "take_scores",
]

Record = TypeVar("Record", Rollout, Experience, TokenOrigin)

FULL = ("input_ids", "attention_mask")
"""Tensors (B, L + T); all others are (B, T) or (B,)."""


def every_nth_prompt(experience: Experience, first: int, n: int) -> Experience:
    """The rows of prompts first, first + n, ...; padding stays as it is, and groups stay whole."""
    rollout, size = experience.rollout, experience.rollout.group_size
    picked = list(range(first, len(rollout.prompts), n))
    rows = torch.tensor([p * size + g for p in picked for g in range(size)])
    taken = _each_tensor(experience, lambda name, value: value[rows])
    return dataclasses.replace(
        taken,
        rollout=dataclasses.replace(taken.rollout, prompts=[rollout.prompts[p] for p in picked]),
        scores=take_scores(experience.scores, rows.tolist()),
    )


def take_rollout(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    """Some rows (groups of one from here on), without columns that are padding in all of them."""
    index = torch.tensor(list(rows), device=rollout.input_ids.device)
    prompt, response = _longest([row_lengths(rollout)[row] for row in rows])
    length, end = rollout.prompt_length, rollout.prompt_length + response

    def take(name: str, value: Tensor) -> Tensor:
        picked = value[index]
        if name in FULL:
            return picked[:, length - prompt : end]
        return picked[:, :response] if picked.ndim == 2 else picked

    prompts = [rollout.prompts[row // rollout.group_size] for row in rows]
    taken = _each_tensor(rollout, take)
    return dataclasses.replace(taken, prompts=prompts, group_size=1, prompt_length=prompt)


def take_experience(experience: Experience, rows: Sequence[int]) -> Experience:
    """As `take_rollout`, with everything that the update needs."""
    rollout = take_rollout(experience.rollout, rows)
    index = torch.tensor(list(rows), device=experience.loss_mask.device)
    response = rollout.response_mask.shape[1]
    taken = _each_tensor(experience, lambda name, value: value[index][:, :response], skip=("rollout",))
    return dataclasses.replace(taken, rollout=rollout, scores=take_scores(experience.scores, rows))


def join_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Rows of several rollouts of one direction in one, padded to the longest.

    Their groups stay groups if they all have the same size; else every row is a group of one.
    """
    sizes = {rollout.group_size for rollout in rollouts}
    parts = rollouts if len(sizes) == 1 else [take_rollout(r, range(len(r.input_ids))) for r in rollouts]
    prompt = max(part.prompt_length for part in parts)
    response = max(part.response_mask.shape[1] for part in parts)
    padded = [
        _each_tensor(part, _padder(prompt - part.prompt_length, response - part.response_mask.shape[1]))
        for part in parts
    ]
    return dataclasses.replace(
        _concatenate(padded),
        prompts=[prompt for part in parts for prompt in part.prompts],
        prompt_length=prompt,
        decode_s=sum(part.decode_s for part in parts),
        active_rows=[row for part in parts for row in part.active_rows],
    )


def join_experiences(experiences: Sequence[Experience]) -> Experience:
    """As `join_rollouts`, with everything that the update needs."""
    rollout = join_rollouts([experience.rollout for experience in experiences])
    length = rollout.response_mask.shape[1]
    padded = [
        _each_tensor(part, _padder(0, length - part.loss_mask.shape[1]), skip=("rollout",))
        for part in experiences
    ]
    return dataclasses.replace(
        _concatenate(padded, skip=("rollout",)),
        rollout=rollout,
        scores=Scores.joined([part.scores for part in experiences]),
    )


def row_lengths(rollout: Rollout) -> list[RowLength]:
    """Prompt and response tokens of every row; an empty response counts as one."""
    prompt = rollout.attention_mask[:, : rollout.prompt_length].sum(dim=1).tolist()
    response = rollout.attention_mask[:, rollout.prompt_length :].sum(dim=1).clamp(min=1).tolist()
    return list(zip(prompt, response, strict=True))


def budgeted_batches(
    accelerator: Accelerator, experiences: Sequence[Experience], *, tokens: int, width: int
) -> list[Experience]:
    """This rank's micro-batches: rows of all ranks, dealt out by cost and packed under a budget.

    Every rank gets the same number of micro-batches of each direction, so that none leaves a loop in which
    others still wait for it; a rank that has too few rows gets copies of one that count nowhere.

    Args:
        accelerator: Its ranks share the work.
        experiences: This rank's rows, at least one.
        tokens: Of a micro-batch, padding included, see `pack_rows`.
        width: Of the model, see `row_cost`.
    """
    batches: list[Experience] = []
    for direction in _directions(accelerator, experiences):
        mine = [e for e in experiences if e.rollout.direction == direction]
        whole = _of_all_ranks(accelerator, mine)
        lengths = row_lengths(whole.rollout)
        hands = deal_rows([row_cost(length, width) for length in lengths], accelerator.num_processes)
        plans = [pack_rows([lengths[row] for row in hand], tokens) for hand in hands]
        hand, most = hands[accelerator.process_index], max(len(plan) for plan in plans)
        shortest = min(range(len(lengths)), key=lambda row: sum(lengths[row]))
        for places in pack_rows([lengths[row] for row in hand], tokens, num_batches=most):
            rows = [hand[place] for place in places]
            batches.append(take_experience(whole, rows) if rows else _blank(whole, shortest))
    return batches


def replay_rollouts(
    accelerator: Accelerator,
    model: nn.Module,
    policy: Policy,
    rollouts: Sequence[Rollout],
    sampling: SamplingSettings,
    *,
    tokens: int = 0,
    with_values: bool = True,
) -> list[PolicyOutput]:
    """Score the responses of this rank's rollouts, one rollout at a time or under a budget of tokens.

    Args:
        accelerator: With a budget, all of its ranks make the same number of forward passes.
        model, policy, sampling: See `replay_tokens`.
        rollouts: This rank's.
        tokens: Of a micro-batch, padding included; 0 runs each rollout as it is.
        with_values: As for `Policy.forward`.

    Returns:
        One output for each rollout. With a budget, what stands off the response mask is 0.
    """
    if not tokens:
        return [
            replay_tokens(model, policy, rollout, sampling, with_values=with_values) for rollout in rollouts
        ]
    if len({rollout.direction for rollout in rollouts}) > 1:
        outputs: dict[int, PolicyOutput] = {}
        for direction in sorted({rollout.direction for rollout in rollouts}):
            places = [i for i, rollout in enumerate(rollouts) if rollout.direction == direction]
            own = replay_rollouts(
                accelerator,
                model,
                policy,
                [rollouts[i] for i in places],
                sampling,
                tokens=tokens,
                with_values=with_values,
            )
            outputs |= zip(places, own, strict=True)
        return [outputs[i] for i in range(len(rollouts))]
    whole = join_rollouts(rollouts)
    lengths = row_lengths(whole)
    most = max(gather_rows(accelerator, [len(pack_rows(lengths, tokens))]))
    found: dict[str, Tensor] = {}
    for rows in pack_rows(lengths, tokens, num_batches=most):
        part = take_rollout(whole, rows or [0])
        output = replay_tokens(model, policy, part, sampling, with_values=with_values)
        for field in dataclasses.fields(output):
            value: Tensor = getattr(output, field.name)
            shape = whole.response_mask.shape
            held = found.setdefault(field.name, value.new_zeros(shape))
            if rows:
                held[rows, : value.shape[1]] = value
    ends = np.cumsum([len(rollout.input_ids) for rollout in rollouts]).tolist()
    return [
        PolicyOutput(
            **{
                name: value[end - len(rollout.input_ids) : end, : rollout.response_mask.shape[1]]
                for name, value in found.items()
            }
        )
        for rollout, end in zip(rollouts, ends, strict=True)
    ]


def _of_all_ranks(accelerator: Accelerator, experiences: Sequence[Experience]) -> Experience:
    if accelerator.num_processes == 1:
        return join_experiences(experiences)
    mine = _to(join_experiences(experiences), "cpu") if experiences else None
    parts = [part for part in gather_rows(accelerator, [mine]) if part is not None]
    return _to(join_experiences(parts), accelerator.device)


def _directions(accelerator: Accelerator, experiences: Sequence[Experience]) -> list[Direction]:
    """Of all ranks, in one order."""
    return sorted(set(gather_rows(accelerator, [e.rollout.direction for e in experiences])))


def _blank(experience: Experience, row: int) -> Experience:
    """One row that takes part in the forward pass and in nothing else."""
    taken = take_experience(experience, [row])
    return dataclasses.replace(taken, loss_mask=torch.zeros_like(taken.loss_mask))


def _longest(lengths: Sequence[RowLength]) -> RowLength:
    return max(prompt for prompt, _ in lengths), max(response for _, response in lengths)


def take_scores(scores: Scores, rows: Sequence[int]) -> Scores:
    """Scores of some rows."""
    picked = list(rows)
    return Scores(
        total=scores.total[picked],
        components={name: values[picked] for name, values in scores.components.items()},
    )


def _padder(prompt: int, response: int) -> Callable[[str, Tensor], Tensor]:
    """Adds columns of zeros: of prompts on the left, of responses on the right."""

    def pad(name: str, value: Tensor) -> Tensor:
        if value.ndim == 1:
            return value
        return nn.functional.pad(value, (prompt if name in FULL else 0, response))

    return pad


def move_rollout(rollout: Rollout, device: torch.device | str) -> Rollout:
    """The same rows on another device."""
    return _each_tensor(rollout, lambda name, value: value.to(device))


def _to(experience: Experience, device: torch.device | str) -> Experience:
    return _each_tensor(experience, lambda name, value: value.to(device))


def _each_tensor(
    record: Record, change: Callable[[str, Tensor], Tensor], *, skip: Sequence[str] = ()
) -> Record:
    """A copy with every tensor changed, those of nested records too."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in skip:
            continue
        if isinstance(value, Tensor):
            changed[field.name] = change(field.name, value)
        elif isinstance(value, (Rollout, TokenOrigin)):
            nested: Any = value
            changed[field.name] = _each_tensor(nested, change)
    return dataclasses.replace(record, **changed)


def _concatenate(records: Sequence[Record], *, skip: Sequence[str] = ()) -> Record:
    """Rows of all records; fields that are no tensors are the first record's."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(records[0]):
        values = [getattr(record, field.name) for record in records]
        if field.name in skip:
            continue
        if isinstance(values[0], Tensor):
            changed[field.name] = torch.cat(values)
        elif isinstance(values[0], TokenOrigin):
            changed[field.name] = _concatenate(values)
    return dataclasses.replace(records[0], **changed)
