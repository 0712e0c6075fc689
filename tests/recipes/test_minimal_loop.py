"""The minimal loop and the trainer are one algorithm: the same seed gives the same samples and weights."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipes.minimal_loop import Settings, train
from storage import FeatureStore
from unirl.trainer.prompts import PromptSource
from unirl.trainer.stages import Stage
from unirl.types import Direction, Sample, Scores

SETTINGS = Settings(
    steps=3,
    prompts_per_step=4,
    group_size=3,
    max_words=3,
    updates_per_step=2,
    warmup_steps=2,
    learning_rate=5e-4,
    kl_coef=0.1,
)


@pytest.fixture(scope="module")
def toy() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "toy.py")))


@pytest.fixture(scope="module")
def store(toy: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return toy.make_store(tmp_path_factory.mktemp("minimal") / "store")


class Remembers:
    """The toy's reward; keeps what it was shown while training. Some samples cannot be scored."""

    def __init__(self, toy: SimpleNamespace) -> None:
        self._reward = toy.Likes(unscored=5)
        self.seen: list[Sample] = []

    def score(self, samples: Sequence[Sample]) -> Scores:
        self.seen += samples
        return self._reward.score(samples)


@pytest.mark.parametrize(("algorithm", "direction"), [("ppo", "image"), ("grpo", "text")])
def test_the_minimal_loop_equals_the_trainer(
    toy: SimpleNamespace, store: FeatureStore, tmp_path: Path, algorithm: str, direction: Direction
) -> None:
    settings = replace(SETTINGS, algorithm=algorithm, direction=direction)
    policy, mine = toy.make_policy().double(), Remembers(toy)
    source = PromptSource(
        store.select("split = 'rl'"),
        direction,
        image_size=toy.SIDE,
        prompts_per_step=settings.prompts_per_step,
        seed=toy.SETTINGS.seed,
    )
    batches = (source.next() for _ in count())
    metrics = list(train(policy, toy.make_tokenizer(), mine, batches, settings, seed=toy.SETTINGS.seed))
    source.close()

    stage = Stage(name=direction, prompts="split = 'rl'", kl_target=None, **asdict(settings))
    theirs = Remembers(toy)
    trainer = toy.make_trainer(
        tmp_path / "run",
        store,
        stages=(stage,),
        policy=toy.make_policy().double(),
        reward=theirs,
        evaluation_prompts={},
    )
    trainer.train()

    assert len(mine.seen) == settings.steps * settings.prompts_per_step * settings.group_size
    for one, other in zip(mine.seen, theirs.seen, strict=True):
        assert (one.key, one.caption) == (other.key, other.caption)
        assert np.array_equal(one.image, other.image)
    start = toy.make_policy().double().lm.state_dict()
    for (name, weight), other in zip(
        policy.state_dict().items(), trainer.policy.state_dict().values(), strict=True
    ):
        assert float((weight - other).abs().max()) < 1e-6, name
    changed = [
        name for name, weight in policy.lm.state_dict().items() if not torch.equal(weight, start[name])
    ]
    assert len(changed) == len(start)
    logged = [line for line in toy.metrics_of(tmp_path / "run") if line["kind"] == "train"]
    for one, line in zip(metrics, logged, strict=True):
        for name, value in one.items():
            assert value == pytest.approx(line[name], abs=1e-6)
