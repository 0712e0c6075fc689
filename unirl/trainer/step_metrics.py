"""What one step of the loop says about itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unirl.algorithms import kl_k1, token_metrics
from unirl.policies.token_lm import PolicyOutput
from unirl.trainer.mismatch import mismatch_metrics
from unirl.trainer.stages import Stage
from unirl.types import Experience, Rollout

__all__ = ["clock", "rollout_metrics", "row_metrics", "tokens_per_s"]


@contextmanager
def clock(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that a block takes, under a name."""
    started = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - started


def rollout_metrics(experience: Experience, output: PolicyOutput, stage: Stage) -> dict[str, Tensor]:
    """Metric sums before the update: divergence, entropy, agreement of engine and trainer.

    Args:
        experience: One micro-batch.
        output: What the policy says of its tokens with the weights that they were sampled with.
        stage: Says how a disagreement is corrected.
    """
    rollout, mask = experience.rollout, experience.loss_mask
    divergence, direction = kl_k1(experience.old_logprobs, experience.ref_logprobs), rollout.direction
    return {
        **token_metrics("kl", mask, sums={"reference": divergence, direction: divergence}),
        **token_metrics("entropy", mask, sums={direction: output.entropy}),
        f"kl/{direction}_tokens": mask.sum().double(),
        f"entropy/{direction}_tokens": mask.sum().double(),
        **mismatch_metrics(experience, output, stage),
        **_row_use(rollout),
    }


def _row_use(rollout: Rollout) -> dict[str, Tensor]:
    """Decode steps times the engine's places, and how many of them had a sample that was not done."""
    active = rollout.active_rows
    return {
        "rows/tokens": torch.tensor(float(len(active) * max(active, default=0)), dtype=torch.float64),
        "rows/active_sum": torch.tensor(float(sum(active)), dtype=torch.float64),
    }


def tokens_per_s(experiences: Sequence[Experience]) -> float:
    """Response tokens of this rank over the time of its engine; NaN if the engine took no time."""
    seconds = sum(experience.rollout.decode_s for experience in experiences)
    tokens = sum(int(experience.rollout.response_mask.sum()) for experience in experiences)
    return tokens / seconds if seconds else float("nan")


def row_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over experience rows; rewards without the samples that could not be scored."""
    names = ["reward", *(name for name in rows[0] if name.startswith("reward/"))]
    columns = {name: np.array([row[name] for row in rows]) for name in names}
    known = {name: values[~np.isnan(values)] for name, values in columns.items()}
    metrics = {
        ("reward/mean" if name == "reward" else name): float(values.mean()) if len(values) else float("nan")
        for name, values in known.items()
    }
    metrics["reward/std"] = float(known["reward"].std()) if len(known["reward"]) else float("nan")
    metrics["reward/unscored_fraction"] = 1.0 - len(known["reward"]) / len(rows)
    metrics["rollout/length"] = float(np.mean([row["num_tokens"] for row in rows]))
    metrics["rollout/truncated_fraction"] = float(np.mean([row["truncated"] for row in rows]))
    return metrics
