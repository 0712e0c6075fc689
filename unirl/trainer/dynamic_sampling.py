"""Dynamic sampling: roll out again until enough prompts have samples that differ in reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator

from unirl.algorithms import informative_groups
from unirl.trainer.distributed import gather_rows
from unirl.trainer.row_batches import join_rollouts, move_rollout, take_rollout, take_scores
from unirl.trainer.stages import Stage
from unirl.types import Direction, Rollout, Sample, Scores

__all__ = ["Drawn", "draw_informative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """This rank's samples of a step, scored; one entry of each list for each micro-batch."""

    rollouts: Sequence[Rollout]
    samples: Sequence[Sequence[Sample]]
    scores: Sequence[Scores]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The samples of one prompt."""

    rollout: Rollout
    samples: Sequence[Sample]
    scores: Scores
    is_informative: bool


def draw_informative(
    accelerator: Accelerator,
    stage: Stage,
    draw: Callable[[int], Drawn],
    *,
    rounds: int,
    micro_prompts: int,
) -> tuple[Drawn, dict[str, float]]:
    """Draw until the step has its number of prompts whose samples differ in reward.

    All ranks see all groups, keep the first that teach something in the order of the prompts, and share them;
    what is missing after the last round is made up with the first of those that teach nothing. So what is
    trained on does not depend on the number of ranks, and what is left over is dropped.

    Args:
        accelerator: Its ranks share the prompts.
        stage: How many prompts, and what they are answered with.
        draw: Rolls out and scores this rank's share of a round, counted from 0.
        rounds: At most so many, 1 or more; 1 takes what comes.
        micro_prompts: Prompts in a micro-batch.

    Returns:
        This rank's share, and "sampling/rounds", "sampling/informative_fraction" (of all groups drawn) and
        "sampling/filled_fraction" (of the groups kept); no metrics where there is one round only.

    Source: Yu et al. 2025, "DAPO", arXiv:2503.14476, section 3.2 and equation 11.
    """
    first = draw(0)
    if rounds == 1:
        return first, {}
    needed = stage.prompts_per_step // len(stage.directions)
    drawn, groups, number = [first], _of_all_ranks(accelerator, first), 1
    while number < rounds and not all(len(_informative(groups, d)) >= needed for d in stage.directions):
        drawn.append(draw(number))
        groups += _of_all_ranks(accelerator, drawn[-1])
        number += 1
    kept = {d: _first(groups, d, needed) for d in stage.directions}
    num_filled = sum(not group.is_informative for part in kept.values() for group in part)
    metrics = {
        "sampling/rounds": float(number),
        "sampling/informative_fraction": sum(group.is_informative for group in groups) / len(groups),
        "sampling/filled_fraction": num_filled / stage.prompts_per_step,
    }
    return _share(accelerator, list(kept.values()), micro_prompts, drawn), metrics


def _informative(groups: Sequence[_Group], direction: Direction) -> list[_Group]:
    return [group for group in groups if group.is_informative and group.rollout.direction == direction]


def _first(groups: Sequence[_Group], direction: Direction, needed: int) -> list[_Group]:
    """The first informative groups, made up with others, in the order in which they were drawn."""
    own = [group for group in groups if group.rollout.direction == direction]
    chosen = sorted(range(len(own)), key=lambda i: not own[i].is_informative)[:needed]
    return [own[i] for i in sorted(chosen)]


def _share(
    accelerator: Accelerator, kept: Sequence[Sequence[_Group]], micro_prompts: int, drawn: Sequence[Drawn]
) -> Drawn:
    """This rank's groups as micro-batches, one direction after the other in turn."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    blocks: list[Sequence[_Group]] = []
    size = len(kept[0]) // world_size
    for start in range(rank * size, (rank + 1) * size, micro_prompts):
        blocks += [part[start : start + micro_prompts] for part in kept]
    rollouts = [move_rollout(join_rollouts([g.rollout for g in b]), accelerator.device) for b in blocks]
    mine = [rollout for part in drawn for rollout in part.rollouts]
    rollouts[0] = replace(
        rollouts[0],
        decode_s=sum(rollout.decode_s for rollout in mine),
        active_rows=[row for rollout in mine for row in rollout.active_rows],
    )
    return Drawn(
        rollouts=rollouts,
        samples=[[sample for group in block for sample in group.samples] for block in blocks],
        scores=[Scores.joined([group.scores for group in block]) for block in blocks],
    )


def _of_all_ranks(accelerator: Accelerator, drawn: Drawn) -> list[_Group]:
    return gather_rows(
        accelerator,
        [
            group
            for rollout, samples, scores in zip(drawn.rollouts, drawn.samples, drawn.scores, strict=True)
            for group in _groups(rollout, samples, scores)
        ],
    )


def _groups(rollout: Rollout, samples: Sequence[Sample], scores: Scores) -> list[_Group]:
    size = rollout.group_size
    teaches = informative_groups(torch.from_numpy(scores.total).view(-1, size)).tolist()
    groups = []
    for p, prompt in enumerate(rollout.prompts):
        rows = list(range(p * size, (p + 1) * size))
        own = replace(
            take_rollout(rollout, rows), prompts=[prompt], group_size=size, decode_s=0.0, active_rows=()
        )
        groups.append(
            _Group(
                rollout=move_rollout(own, "cpu"),
                samples=samples[p * size : (p + 1) * size],
                scores=take_scores(scores, rows),
                is_informative=teaches[p],
            )
        )
    return groups
