"""Which checkpoint is the best of a run, and that it stays whole however old it grows."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage import FeatureStore
from unirl.trainer.evaluate import Evaluation, Quality, quality_of
from unirl.types import Sample, Scores


class Scripted:
    """A judge that accepts a given share at each evaluation, one after the other; NaN can tell nothing."""

    def __init__(self, *shares: float) -> None:
        self.shares = list(shares)

    def judge(self, samples: Sequence[Sample]) -> np.ndarray:
        share = self.shares.pop(0)
        accepted = np.arange(len(samples)) < share * len(samples)
        return np.full(len(samples), np.nan) if np.isnan(share) else accepted.astype(np.float64)


def evaluation(judgements: Sequence[float], rewards: Sequence[float]) -> Evaluation:
    return Evaluation(
        samples=(), scores=Scores(total=np.array(rewards), components={}), judgements=np.array(judgements)
    )


def test_a_direction_without_a_judge_leaves_the_word_to_the_other() -> None:
    judged, unjudged = evaluation([1.0, 0.0], [0.2, 0.4]), evaluation([np.nan], [0.9])
    found = quality_of([judged, unjudged])
    assert found.judge == pytest.approx(0.5) and found.reward == pytest.approx(0.6)
    assert quality_of([unjudged]) == Quality(judge=None, reward=0.9)
    assert quality_of([evaluation([np.nan], [np.nan])]) == Quality()
    assert quality_of([]) == Quality()


def test_without_a_judge_the_best_is_the_one_of_most_reward(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(toy.SETTINGS, checkpoint_every=1, keep_checkpoints=1, evaluate_every=1)
    stage = replace(toy.STAGES[0], steps=5)
    with caplog.at_level(logging.WARNING):
        toy.make_trainer(
            tmp_path, toy_store, settings=settings, stages=(stage,), judge=Scripted(*[np.nan] * 12)
        ).train()
    assert caplog.text.count("best is the checkpoint of most reward") == 1
    rewards: dict[int, list[float]] = {}
    for line in toy.metrics_of(tmp_path):
        if line["kind"] == "eval" and line["step"]:
            assert line["eval/judge"] is None
            rewards.setdefault(line["step"], []).append(line["eval/reward"])
    means = {step: float(np.mean(values)) for step, values in rewards.items()}
    best = max(means, key=lambda step: (means[step], step))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == sorted({f"step-{best:08d}", "step-00000005"})


def test_the_best_keeps_its_reference(toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path) -> None:
    """The reference moves before every step; the judge likes the policy of the second step best."""
    settings = replace(toy.SETTINGS, checkpoint_every=1, keep_checkpoints=1, evaluate_every=1)
    stage = replace(toy.STAGES[0], steps=5, reference_every=1)
    shares = [share for share in (0.0, 0.2, 0.9, 0.3, 0.2, 0.1) for _ in range(2)]
    toy.make_trainer(tmp_path, toy_store, settings=settings, stages=(stage,), judge=Scripted(*shares)).train()
    named = {
        path.name: json.loads((path / "state.json").read_text())["state"]["position"]["reference_step"]
        for path in (tmp_path / "checkpoints").glob("step-*")
    }
    assert named == {"step-00000002": 1, "step-00000005": 4}
    kept = {path.name for path in (tmp_path / "references").iterdir()}
    assert {"step-00000001.safetensors", "step-00000004.safetensors"} <= kept
    assert len(kept) <= 4
