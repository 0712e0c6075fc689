"""A reward with running statistics belongs to the state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage import FeatureStore
from unirl.rewards import Ensemble, Member


class Killed(Exception):
    """Stands for a kill: nothing after it runs."""


def reward(toy: SimpleNamespace) -> Ensemble:
    return Ensemble({"likes": Member(reward=toy.Likes(unscored=5), normalization="running", clip=(-2, 2))})


def test_a_cut_run_ends_with_the_statistics_of_the_uncut_one(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    """Evaluations leave them alone: they count the training samples that had a score, and no others."""
    stages = toy.STAGES[:1]
    whole = toy.make_trainer(tmp_path / "whole", toy_store, stages=stages, reward=reward(toy))
    whole.train()

    def on_step(stage: str, done: int, total: int, metrics: Mapping[str, float]) -> None:
        if done == 2:
            raise Killed

    cut = toy.make_trainer(tmp_path / "cut", toy_store, stages=stages, reward=reward(toy), on_step=on_step)
    with pytest.raises(Killed):
        cut.train()
    rest = toy.make_trainer(tmp_path / "cut", toy_store, stages=stages, reward=reward(toy))
    rest.train()
    assert rest.rewards.state_dict() == whole.rewards.state_dict()
    assert toy.metrics_of(tmp_path / "cut") == toy.metrics_of(tmp_path / "whole")
    samples = stages[0].steps * stages[0].samples_per_step
    assert 0.7 * samples < whole.rewards.of(stages[0]).moments["likes"].count < samples
