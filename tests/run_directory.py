"""A small run directory as training leaves it, for tests that read one.

Load it with `runpy.run_path`, since the tests are no package.
"""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from storage import FeatureStore

STAGES = ("text", "image")


def make_run(path: Path, *, steps: int = 4, prompts: int = 3, samples: int = 3, caption: str = "") -> Path:
    """Write a finished run with `steps` steps in each of two stages.

    Its reward is right more often with every step, its component `reward/length` knows nothing, and every
    seventh sample has no score of it. Only evaluations are judged. With the defaults there are 108 samples.

    Args:
        path: Directory to make.
        steps: Steps of each stage.
        prompts: Prompts of each step and evaluation.
        samples: Samples of each prompt.
        caption: Text that ends every caption, to try how a reader treats it.
    """
    path.mkdir(parents=True)
    rng = np.random.default_rng(0)
    _make_data(path / "store", prompts)
    rows = list(_rows(steps, prompts, samples, caption, rng))
    experience = FeatureStore.create(path / "experience")
    tensors = {"tokens": ("int32", (6,)), "logprobs": ("float32", (6,)), "advantages": ("float32", (6,))}
    for step, found in itertools.groupby(rows, key=lambda row: row["step"]):
        with experience.writer(message=f"step {step}", tensors=tensors) as writer:
            for row in found:
                writer.add(**row, tensors=_tensors(row["num_tokens"], rng))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _metrics(rows, steps)))
    write_json(
        path / "run.json",
        {
            "recipe": "shapes",
            "config": {"lr": 2e-4, "stages": list(STAGES)},
            "commit": "0123abc",
            "versions": {"python": "3.11", "torch": "2.13.0"},
            "seed": 0,
            "snapshot": 1,
            "store": str(path / "store"),
            "command": "unirl train shapes --seed 0",
            "created": "2026-01-02T03:04:05Z",
        },
    )
    write_json(
        path / "summary.json",
        {
            "runs": [
                {
                    "stage": stage,
                    "seed": 0,
                    "judge_before": 0.25,
                    "judge_after": 0.5 + index / 4,
                    "reward_before": 0.3,
                    "reward_after": 0.6,
                    "steps": steps,
                    "wall_s": 8.0,
                }
                for index, stage in enumerate(STAGES)
            ],
            "total_wall_s": 75.0,
            "peak_memory_bytes": 3 * 2**30,
            "report": "report.html",
            "store": "store",
        },
    )
    return path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def picture(number: int) -> bytes:
    """A PNG of 24x12 pixels that differs for each number."""
    pixels = np.full((12, 24, 3), 255, dtype=np.uint8)
    pixels[2:10, 2 + number % 12 : 10 + number % 12] = ((number * 53) % 256, (number * 97) % 256, 60)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _make_data(path: Path, prompts: int) -> None:
    store = FeatureStore.create(path)
    with store.writer(message="ingest") as writer:
        for number in range(prompts):
            writer.add(f"p{number}", blob=picture(number), caption=f"shape {number}", split="rl")
        writer.quarantine(
            key="bad", place="tar-1/bad.jpg", reason="image file is truncated", data=b"\xff\xd8"
        )


def _rows(
    steps: int, prompts: int, samples: int, caption: str, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    plan = [("eval", "start", 0, direction) for direction in STAGES]
    for place, stage in enumerate(STAGES):
        first = 1 + place * steps
        plan += [("train", stage, step, stage) for step in range(first, first + steps)]
        plan += [("eval", stage, first + steps - 1, direction) for direction in STAGES]
    number = 0
    for kind, stage, step, direction in plan:
        for prompt in range(prompts):
            for sample in range(samples if kind == "train" else 2):
                number += 1
                good = float(rng.random() < 0.3 + 0.5 * step / (2 * steps))
                vlm = float(np.clip(good * 0.6 + rng.normal(0.2, 0.15), 0, 1))
                target = f"shape {prompt}{caption}"
                written = target if good else f"thing {number}{caption}"
                yield {
                    "key": f"{kind}/{stage}/{direction}/{step:06d}/{prompt:04d}/{sample:03d}",
                    "blob": picture(number),
                    "kind": kind,
                    "stage": stage,
                    "direction": direction,
                    "step": step,
                    "prompt_key": f"p{prompt}",
                    "sample": sample,
                    "prompt": target if direction == "image" else "What is this?",
                    "target": target,
                    "response": written if direction == "text" else "",
                    "reward": vlm,
                    "reward/vlm": vlm,
                    "reward/length": math.nan if number % 7 == 0 else float(rng.random()),
                    "judge": good if kind == "eval" else math.nan,
                    "advantage": 0.1,
                    "kl": 0.01,
                    "entropy": 1.0,
                    "num_tokens": 1 + number % 6,
                    "truncated": False,
                    "policy_version": step,
                }


def _tensors(num_tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    real = np.arange(6) < num_tokens
    return {
        "tokens": (rng.integers(1, 50, 6) * real).astype(np.int32),
        "logprobs": (-rng.random(6) * real).astype(np.float32),
        "advantages": (rng.normal(size=6) * real).astype(np.float32),
    }


def _metrics(rows: list[dict[str, Any]], steps: int) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["stage"], row["step"], row["direction"]), []).append(row)
    for (kind, stage, step, direction), found in groups.items():
        reward = float(np.mean([row["reward"] for row in found]))
        line = {"step": step, "stage": stage, "kind": kind, "direction": direction, "wall_s": 2.0 * step}
        if kind == "eval":
            judge = float(np.mean([row["judge"] for row in found]))
            yield line | {"stage_step": 0, "eval/judge": judge, "eval/reward": reward}
            continue
        yield line | {
            "stage_step": (step - 1) % steps + 1,
            "reward/mean": reward,
            "reward/vlm": reward,
            "kl/reference": 0.01 * step,
            f"kl/{stage}": 0.01 * step,
            "kl/coef": 0.02,
            "kl/tokens": 5000.0,
            f"entropy/{stage}": 2.0 - 0.1 * step,
            "entropy/tokens": 5000.0,
            "policy/clip_fraction": 0.05,
            "policy/loss": -0.01,
            "value/loss": None if step == 1 else 0.2,
            "time/rollout_s": 1.0,
            "time/reward_s": 0.4,
            "time/update_s": 0.6,
            "time/step_s": 2.0,
            "memory/rss_bytes": 2**30 + step * 2**20,
        }
