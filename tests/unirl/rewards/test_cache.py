from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unirl.errors import ConfigError
from unirl.rewards import Ensemble, VlmYesNo
from unirl.rewards.cache import CachedReward
from unirl.types import Sample, Scores


class Counting:
    """Scores a sample by the mean of its picture, counts what it sees, and fails on some captions."""

    def __init__(self, identity: str = "mean/1", *, fails: str | None = None) -> None:
        self.identity, self.fails, self.seen = identity, fails, 0

    def score(self, samples: Sequence[Sample]) -> Scores:
        self.seen += len(samples)
        values = np.array([np.nan if s.caption == self.fails else s.image.mean() for s in samples])
        return Scores(total=values, components={"mean": values, "twice": 2 * values})


Make = Callable[..., list[Sample]]


def test_what_is_known_is_not_scored_again(tmp_path: Path, samples: Make) -> None:
    batch = samples(12)
    plain = Counting().score(batch)
    reward = Counting()
    cached = CachedReward(reward, tmp_path / "scores")
    first, second = cached.score(batch), cached.score([*reversed(batch)])
    assert reward.seen == 12 and cached.num_hits == 12
    np.testing.assert_array_equal(first.total, plain.total)
    np.testing.assert_array_equal(second.total, plain.total[::-1])
    np.testing.assert_array_equal(second.components["twice"], plain.components["twice"][::-1])

    again = Counting()
    opened = CachedReward(again, tmp_path / "scores")
    mixed = opened.score([*batch[:3], *samples(2, seed=1)])
    assert again.seen == 2
    np.testing.assert_array_equal(mixed.total[:3], plain.total[:3])


def test_another_model_another_picture_and_another_caption_miss(tmp_path: Path, samples: Make) -> None:
    batch = samples(3)
    CachedReward(Counting(), tmp_path / "scores").score(batch)
    other = Counting("mean/2")
    CachedReward(other, tmp_path / "scores").score(batch)
    assert other.seen == 3
    same = Counting()
    changed = [
        replace(batch[0], caption="something else"),
        replace(batch[1], image=batch[1].image ^ 1),
        replace(batch[2], key="another name"),
    ]
    CachedReward(same, tmp_path / "scores").score(changed)
    assert same.seen == 2


def test_missing_scores_are_tried_again(tmp_path: Path, samples: Make) -> None:
    batch = samples(6)
    failing = Counting(fails="a red circle")
    cached = CachedReward(failing, tmp_path / "scores")
    first = cached.score(batch)
    assert np.isnan(first.total).tolist() == [s.caption == "a red circle" for s in batch]
    failing.fails = None
    assert np.isfinite(cached.score(batch).total).all()
    assert failing.seen == 6 + int(np.isnan(first.total).sum())


def test_a_sample_that_comes_twice_is_scored_once(tmp_path: Path, samples: Make) -> None:
    reward, one = Counting(), samples(1)[0]
    scores = CachedReward(reward, tmp_path / "scores").score([one, one])
    assert reward.seen == 1 and scores.total[0] == scores.total[1]


def test_what_others_scored_meanwhile_is_kept_once(tmp_path: Path, samples: Make) -> None:
    """Both open the store before either writes, as two processes do."""
    batch = samples(9)
    one, other = (CachedReward(Counting(), tmp_path / "scores") for _ in range(2))
    one.score(batch[:6])
    np.testing.assert_array_equal(other.score(batch[3:]).total, Counting().score(batch[3:]).total)
    third = Counting()
    np.testing.assert_array_equal(
        CachedReward(third, tmp_path / "scores").score(batch).total, Counting().score(batch).total
    )
    assert third.seen == 0


def test_the_vision_language_reward_can_be_cached(tmp_path: Path, samples: Make, tiny_vlm: Path) -> None:
    reward, batch = VlmYesNo.load(tiny_vlm), samples(8)
    first = CachedReward(reward, tmp_path / "scores").score(batch)
    second = CachedReward(VlmYesNo.load(tiny_vlm), tmp_path / "scores")
    np.testing.assert_array_equal(second.score(batch).total, first.total)
    assert second.num_hits == 8


def test_an_ensemble_is_not_cached_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give its members caches"):
        CachedReward(Ensemble({"one": (Counting(), 1.0)}), tmp_path / "scores")  # type: ignore[arg-type]
