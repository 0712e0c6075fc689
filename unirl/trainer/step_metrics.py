"""What one step of the loop says about itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from unirl.algorithms import kl_k1, token_metrics
from unirl.policies.policy import PolicyOutput
from unirl.trainer.mismatch import mismatch_metrics
from unirl.trainer.stages import Stage
from unirl.types import Experience, Rollout

__all__ = ["agreement_metrics", "held_memory", "measure", "rollout_metrics", "row_metrics", "tokens_per_s"]


@contextmanager
def measure(phases: dict[str, float], name: str) -> Iterator[None]:
    """Add what a block takes to the metrics `time/NAME_s` and `memory/NAME_bytes`.

    Times add up. The memory is the largest that torch held on the GPU within the blocks of the name; without
    one it is what the process had resident at the end of one of them.
    """
    on_gpu = torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    yield
    seconds, memory = f"time/{name}_s", f"memory/{name}_bytes"
    phases[seconds] = phases.get(seconds, 0.0) + time.perf_counter() - started
    held = float(torch.cuda.max_memory_allocated()) if on_gpu else _resident_bytes()
    phases[memory] = max(phases.get(memory, 0.0), held)


def held_memory() -> dict[str, float]:
    """What is held between two steps: by this process, and on its GPU by all processes, an engine's too."""
    held = {"memory/rss_bytes": _resident_bytes()}
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        held["memory/gpu_bytes"] = float(total - free)
    return held


def _resident_bytes() -> float:
    return float(psutil.Process().memory_info().rss)


def rollout_metrics(experience: Experience, output: PolicyOutput | None, stage: Stage) -> dict[str, Tensor]:
    """Metric sums before the update: divergence, entropy, agreement of engine and trainer.

    Args:
        experience: Of one rollout. Without log-probs of the reference nothing is said of the divergence.
        output: As for `agreement_metrics`, of which nothing is said without it.
        stage: Says how a disagreement is corrected.
    """
    rollout, mask = experience.rollout, experience.loss_mask
    metrics = {} if output is None else agreement_metrics(experience, output, stage)
    if experience.ref_logprobs is not None:
        divergence, direction = kl_k1(experience.old_logprobs, experience.ref_logprobs), rollout.direction
        metrics |= token_metrics("kl", mask, sums={"reference": divergence, direction: divergence})
        metrics[f"kl/{direction}_tokens"] = mask.sum().double()
    return metrics | _row_use(rollout)


@torch.no_grad()
def agreement_metrics(experience: Experience, output: PolicyOutput, stage: Stage) -> dict[str, Tensor]:
    """Metric sums of one micro-batch before the update: entropy, and agreement of engine and trainer.

    Args:
        experience: The micro-batch.
        output: What the policy says of its tokens with the weights that they were sampled with.
        stage: Says how a disagreement is corrected.
    """
    mask, direction = experience.loss_mask, experience.rollout.direction
    return {
        **token_metrics("entropy", mask, sums={direction: output.entropy}),
        f"entropy/{direction}_tokens": mask.sum().double(),
        **mismatch_metrics(experience, output, stage),
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
