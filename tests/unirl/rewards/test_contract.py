"""The contract of rewards, tried on every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.contracts.reward_contract import PictureRewardContract, RewardContract
from tests.unirl.rewards.user_functions import mean_red
from unirl.rewards import (
    EmbeddingSimilarity,
    Ensemble,
    ExactMatch,
    Format,
    Length,
    Member,
    Pattern,
    PictureStatistic,
    PictureText,
    UserReward,
    VlmYesNo,
)
from unirl.types import Reward, Sample, Scores

MakeSamples = Callable[..., list[Sample]]


class TestVlmYesNo(PictureRewardContract):
    @pytest.fixture
    def reward(self, tiny_vlm: Path) -> Reward:
        return VlmYesNo.load(tiny_vlm, batch_size=4)


class TestExactMatch(RewardContract):
    @pytest.fixture
    def reward(self) -> Reward:
        return ExactMatch()


class TestPattern(RewardContract):
    @pytest.fixture
    def reward(self) -> Reward:
        return Pattern(r"\b(red|green)\b")


class TestLength(RewardContract):
    @pytest.fixture
    def reward(self) -> Reward:
        return Length(2, 3, slack=4)


class TestFormat(RewardContract):
    @pytest.fixture
    def reward(self) -> Reward:
        return Format("a {what}")


class TestPictureStatistic(PictureRewardContract):
    @pytest.fixture(params=["brightness", "entropy", "jpeg_bits"])
    def reward(self, request: pytest.FixtureRequest) -> Reward:
        return PictureStatistic(request.param)


class TestPictureText(PictureRewardContract):
    @pytest.fixture
    def reward(self) -> Reward:
        return PictureText(lambda picture: f"number {int(picture[0, 0, 0])}")

    @pytest.fixture
    def samples(self, samples: MakeSamples) -> MakeSamples:
        return lambda num: [replace(sample, caption='a sign "number 100"') for sample in samples(num)]


class TestEmbeddingSimilarity(PictureRewardContract):
    @pytest.fixture
    def reward(self, tiny_clip: Path) -> Reward:
        return EmbeddingSimilarity.load(tiny_clip, batch_size=4)


class TestUserReward(PictureRewardContract):
    @pytest.fixture(scope="class")
    def reward(self) -> Iterator[Reward]:
        reward = UserReward(mean_red, num_workers=2, limit_s=20.0)
        yield reward
        reward.close()


class TestEnsemble(PictureRewardContract):
    @pytest.fixture(params=["sum", "worst"])
    def reward(self, request: pytest.FixtureRequest, tiny_vlm: Path) -> Reward:
        return Ensemble(
            {
                "vlm": (VlmYesNo.load(tiny_vlm), 1.0),
                "light": Member(reward=PictureStatistic("brightness"), weight=0.5, clip=(0.0, 1.0)),
                "watched": (ExactMatch(), 0.0),
            },
            combine=request.param,
            disagreement_penalty=0.5,
        )


def test_the_contract_sees_a_reward_that_turns_nan_into_zero(samples: MakeSamples) -> None:
    class Forgetful:
        def score(self, samples: Sequence[Sample]) -> Scores:
            return Scores(total=np.zeros(len(samples)), components={"forgetful": np.zeros(len(samples))})

    with pytest.raises(AssertionError):
        PictureRewardContract().test_what_cannot_be_scored_is_nan_and_never_zero(Forgetful(), samples)
