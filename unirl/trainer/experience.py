"""Experience in a feature store: every sample with its tokens, picture, scores and credit."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from storage import FeatureStore
from storage.query import quote
from unirl.policies.policy import Policy
from unirl.trainer.collect import response_texts
from unirl.trainer.evaluate import Evaluation
from unirl.trainer.sample_statistics import PICTURE_COLUMNS, picture_columns
from unirl.types import Experience, Sample

__all__ = ["ExperienceLog", "Row", "evaluation_rows", "experience_rows"]

Row = dict[str, Any]
"""Columns of one sample by name, with its `key`, its `blob` and its tensors."""
FLOATS = ("reward", "judge", "advantage", "kl", "temperature", "guidance", *PICTURE_COLUMNS)


class ExperienceLog:
    """The run's `experience/` store. One commit a step, so a checkpoint can name what it has seen."""

    def __init__(self, directory: Path, *, length: int) -> None:
        """Open or create the store; `length` is the longest response of any stage, tokens."""
        self._store = FeatureStore.create(directory, exist_ok=True)
        self._length = length

    @property
    def store(self) -> FeatureStore:
        """The rows written so far."""
        return self._store

    @property
    def snapshot_id(self) -> int:
        """What a checkpoint names."""
        return self._store.snapshot.id

    def restore(self, snapshot_id: int) -> None:
        """Forget everything behind a snapshot: a resumed run writes it again."""
        if self._store.snapshot.id != snapshot_id:
            self._store.restore(snapshot_id, message="resume from a checkpoint")
            self._store = self._store.refresh()

    def success_rates(self, stage: str, *, since_step: int, column: str) -> dict[str, float]:
        """Mean score of each prompt of a stage, by the prompt's key, over samples of steps after a step."""
        if not self._store.snapshot.num_rows:
            return {}
        found = self._store.query(
            f"SELECT prompt_key, avg({quote(column)}) AS rate FROM samples WHERE kind = 'train' "
            f"AND stage = '{stage}' AND step > {int(since_step)} AND NOT isnan({quote(column)}) "
            "GROUP BY prompt_key ORDER BY prompt_key"
        ).to_pydict()
        return dict(zip(found["prompt_key"], found["rate"], strict=True))

    def write(self, rows: Sequence[Row], message: str) -> None:
        """Append rows in one commit."""
        scores = {name: "float" for row in rows for name in row if name.startswith("reward/")}
        columns = {**dict.fromkeys(FLOATS, "float"), **scores}
        tensors = {
            "tokens": ("int32", (self._length,)),
            "logprobs": ("float32", (self._length,)),
            "advantages": ("float32", (self._length,)),
        }
        with self._store.writer(message=message, columns=columns, tensors=tensors) as writer:
            for row in rows:
                fields = dict(row)
                padded = {
                    name: _padded(fields.pop(name), dtype, shape) for name, (dtype, shape) in tensors.items()
                }
                writer.add(fields.pop("key"), blob=fields.pop("blob"), tensors=padded, **fields)
        self._store = self._store.refresh()


def experience_rows(
    policy: Policy,
    experience: Experience,
    samples: Sequence[Sample],
    labels: Mapping[str, str | int],
    *,
    first_prompt: int,
) -> list[Row]:
    """Rows of B training samples.

    Args:
        policy: Gives the words of the responses.
        experience: One micro-batch.
        samples: Its B samples.
        labels: stage, step, policy_version: the same for all rows.
        first_prompt: Number of the first prompt within the step, over all ranks.
    """
    rollout = experience.rollout
    texts = response_texts(policy, rollout)
    lengths = rollout.response_mask.sum(dim=1).tolist()
    reference = experience.ref_logprobs
    divergence = rollout.old_logprobs - (torch.nan if reference is None else reference)
    rows = []
    for b, sample in enumerate(samples):
        prompt, g = first_prompt + b // rollout.group_size, b % rollout.group_size
        n = lengths[b]
        rows.append(
            {
                "key": f"train/{labels['stage']}/{labels['step']:06d}/{prompt:04d}/{g:03d}",
                "kind": "train",
                **labels,
                **_sample_fields(sample, texts[b]),
                "sample": g,
                "reward": float(experience.scores.total[b]),
                **{f"reward/{name}": float(part[b]) for name, part in experience.scores.components.items()},
                "judge": float("nan"),
                "advantage": float(experience.advantages[b, :n].mean()),
                "kl": float(divergence[b, :n].mean()),
                "temperature": float(rollout.origin.temperature[b, 0]),
                "guidance": float(rollout.origin.guidance[b, 0]),
                "num_tokens": n,
                "truncated": bool(rollout.truncated[b]),
                "tokens": rollout.response_ids[b, :n],
                "logprobs": rollout.old_logprobs[b, :n],
                "advantages": experience.advantages[b, :n],
            }
        )
    return rows


def evaluation_rows(evaluation: Evaluation, labels: Mapping[str, str | int], name: str) -> list[Row]:
    """Rows of one evaluation; they carry what the held-out judge said and no tokens."""
    empty = np.zeros(0)
    return [
        {
            "key": f"eval/{name}/{labels['step']:06d}/{i:04d}/000",
            "kind": "eval",
            **labels,
            **_sample_fields(sample, sample.caption if sample.direction == "text" else ""),
            "sample": 0,
            "reward": float(evaluation.scores.total[i]),
            **{f"reward/{part}": float(values[i]) for part, values in evaluation.scores.components.items()},
            "judge": float(evaluation.judgements[i]),
            "advantage": float("nan"),
            "kl": float("nan"),
            "temperature": float("nan"),
            "guidance": float("nan"),
            "num_tokens": 0,
            "truncated": False,
            "tokens": empty,
            "logprobs": empty,
            "advantages": empty,
        }
        for i, sample in enumerate(evaluation.samples)
    ]


def _sample_fields(sample: Sample, response: str) -> Row:
    buffer = io.BytesIO()
    Image.fromarray(sample.image).save(buffer, format="PNG")
    return {
        "blob": buffer.getvalue(),
        **picture_columns(sample.image),
        "direction": sample.direction,
        "prompt_key": sample.key,
        "prompt": sample.target if sample.direction == "image" else "what does the picture show?",
        "target": sample.target,
        "response": response,
    }


def _padded(values: Tensor | np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    padded = np.zeros(shape, dtype=dtype)
    padded[: len(values)] = torch.as_tensor(values).cpu().numpy()
    return padded
