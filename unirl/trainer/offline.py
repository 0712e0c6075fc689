"""Stored experience used again: samples of earlier steps, weighed for the policy that they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from storage import FeatureStore
from unirl.algorithms import add_metrics, token_metrics
from unirl.policies.policy import Policy
from unirl.rollout.engine import PartialSample, assemble
from unirl.trainer.distributed import gather_rows
from unirl.trainer.prompts import all_prompts
from unirl.trainer.stages import Stage
from unirl.types import Experience, Prompt, Rollout, Scores

__all__ = ["Reused", "choose_stored", "reuse_stored", "reused_metrics"]

StoredRow = dict[str, Any]
"""Columns of one sample of the experience, with its `tokens` and `logprobs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """This rank's share of earlier samples, as if they had just been drawn."""

    rollouts: Sequence[Rollout] = ()
    scores: Sequence[Scores] = ()


def choose_stored(experience: FeatureStore, stage: Stage, *, step: int, seed: int) -> list[list[StoredRow]]:
    """Pick groups out of the experience, as a function of its rows, the step and the seed.

    Args:
        experience: Of the run.
        stage: How many groups, how old they may be, and whose they are.
        step: Steps done.
        seed: Of the run.

    Returns:
        `stage.offline_prompts` groups of rows, sample by sample; none while there are fewer than that.
    """
    view = experience.select(
        f"kind = 'train' AND stage = '{stage.name}' AND step > {step - stage.offline_staleness} "
        f"AND step <= {step}"
    )
    groups: dict[str, list[int]] = {}
    for place, key in sorted(enumerate(view.keys()), key=lambda item: item[1]):
        groups.setdefault(key.rpartition("/")[0], []).append(place)
    if len(groups) < stage.offline_prompts:
        return []
    stream = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step, 0, 0])))
    picked = stream.choice(len(groups), size=stage.offline_prompts, replace=False)
    names = list(groups)
    places = [place for i in sorted(picked.tolist()) for place in groups[names[i]]]
    chosen = view[places]
    rows = chosen.to_arrow().to_pylist()
    tensors = {name: experience.tensor(name).gather(chosen.rows) for name in ("tokens", "logprobs")}
    for i, row in enumerate(rows):
        row |= {name: values[i, : row["num_tokens"]].tolist() for name, values in tensors.items()}
    return [rows[i : i + stage.group_size] for i in range(0, len(rows), stage.group_size)]


def reuse_stored(
    accelerator: Accelerator,
    policy: Policy,
    store: FeatureStore,
    groups: Sequence[Sequence[StoredRow]],
    stage: Stage,
    *,
    image_size: int,
    micro_prompts: int,
) -> Reused:
    """Turn stored groups into rollouts and scores; each rank takes its part.

    Args:
        accelerator: The rank with the experience tells the others.
        policy: Gives the tokens of the prompts.
        store: Where the prompts are, by their key.
        groups: Of `choose_stored`, on the rank with the experience; empty on the others.
        stage: Under whose settings the samples were drawn.
        image_size: Side of the pictures.
        micro_prompts: Groups in a rollout.
    """
    everything = gather_rows(accelerator, groups)
    size = len(everything) // accelerator.num_processes
    mine = everything[accelerator.process_index * size :][:size]
    prompts = _prompts(store, sorted({group[0]["prompt_key"] for group in mine}), stage, image_size)
    parts = [mine[start : start + micro_prompts] for start in range(0, len(mine), micro_prompts)]
    return Reused(
        rollouts=[_rollout(policy, part, prompts, stage) for part in parts],
        scores=[_scores([row for group in part for row in group]) for part in parts],
    )


def reused_metrics(experiences: Sequence[Experience], *, step: int) -> dict[str, Tensor]:
    """Metric sums of earlier samples that a step learns from: their age in steps and their weights."""
    parts = [
        token_metrics(
            "offline",
            experience.loss_mask,
            sums={
                "age": step - experience.rollout.origin.policy_version,
                "weight": torch.ones_like(experience.advantages)
                if experience.importance is None
                else experience.importance,
            },
        )
        for experience in experiences
    ]
    return add_metrics(parts)


def _prompts(store: FeatureStore, keys: Sequence[str], stage: Stage, image_size: int) -> dict[str, Prompt]:
    if not keys:
        return {}
    view = store.select("key IN (SELECT key FROM wanted)", tables={"wanted": {"key": list(keys)}})
    found = all_prompts(view, stage.directions[0], image_size=image_size)
    return {prompt.key: prompt for prompt in found}


def _rollout(
    policy: Policy, groups: Sequence[Sequence[StoredRow]], prompts: dict[str, Prompt], stage: Stage
) -> Rollout:
    own = [prompts[group[0]["prompt_key"]] for group in groups]
    length = policy.max_response_length(stage.directions[0], stage.max_words)
    samples = [
        PartialSample(
            prompt=prompt,
            seed=(),
            sample=row["sample"],
            max_new_tokens=length,
            sampling=stage.sampling,
            ids=tuple(row["tokens"]),
            logprobs=tuple(row["logprobs"]),
            versions=(row["policy_version"],) * len(row["tokens"]),
            is_ended=not row["truncated"],
        )
        for prompt, group in zip(own, groups, strict=True)
        for row in group
    ]
    return assemble(
        samples,
        prompt_ids=[policy.prompt_ids(prompt) for prompt in own],
        group_size=stage.group_size,
        pad=policy.vocabulary.pad,
        device=policy.device,
    )


def _scores(rows: Sequence[StoredRow]) -> Scores:
    names = [name for name in rows[0] if name.startswith("reward/") and rows[0][name] is not None]
    return Scores(
        total=_column(rows, "reward"),
        components={name.removeprefix("reward/"): _column(rows, name) for name in names},
    )


def _column(rows: Sequence[StoredRow], name: str) -> np.ndarray:
    return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=np.float64)
