"""What every reward must keep. Inherit, and give the fixtures `reward` and `samples`.

`samples(n)` makes n samples with pictures of 32x32 and captions of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from unirl.types import Reward, Sample

MakeSamples = Callable[..., list[Sample]]


class RewardContract:
    @pytest.fixture
    def reward(self) -> Reward:
        raise NotImplementedError

    def test_one_float64_per_sample_and_component(self, reward: Reward, samples: MakeSamples) -> None:
        scores = reward.score(samples(7))
        assert scores.components
        for values in (scores.total, *scores.components.values()):
            assert values.shape == (7,)
            assert values.dtype == np.float64

    def test_order_is_kept(self, reward: Reward, samples: MakeSamples) -> None:
        given = samples(13)
        order = np.random.default_rng(1).permutation(13)
        straight = reward.score(given)
        mixed = reward.score([given[row] for row in order])
        np.testing.assert_allclose(mixed.total, straight.total[order], atol=1e-5)
        for name, values in straight.components.items():
            np.testing.assert_allclose(mixed.components[name], values[order], atol=1e-5)

    def test_alone_as_in_company(self, reward: Reward, samples: MakeSamples) -> None:
        given = samples(11)
        together = reward.score(given).total
        alone = np.concatenate([reward.score([sample]).total for sample in given])
        np.testing.assert_allclose(alone, together, atol=1e-5)

    def test_scoring_twice_gives_the_same_bits(self, reward: Reward, samples: MakeSamples) -> None:
        given = samples(9)
        np.testing.assert_array_equal(reward.score(given).total, reward.score(given).total)

    def test_no_samples_give_no_scores(self, reward: Reward) -> None:
        scores = reward.score([])
        assert scores.total.shape == (0,)

    def test_samples_stay_as_they_are(self, reward: Reward, samples: MakeSamples) -> None:
        given = samples(4)
        before = [sample.image.copy() for sample in given]
        reward.score(given)
        for sample, image in zip(given, before, strict=True):
            np.testing.assert_array_equal(sample.image, image)


class PictureRewardContract(RewardContract):
    """For rewards that look at the picture."""

    def test_what_cannot_be_scored_is_nan_and_never_zero(self, reward: Reward, samples: MakeSamples) -> None:
        given = samples(20)
        given[5] = replace(given[5], image=np.zeros((0, 32, 3), np.uint8))
        scores = reward.score(given)
        assert np.flatnonzero(np.isnan(scores.total)).tolist() == [5]
        clean = reward.score([sample for row, sample in enumerate(given) if row != 5])
        np.testing.assert_allclose(np.delete(scores.total, 5), clean.total, atol=1e-5)
