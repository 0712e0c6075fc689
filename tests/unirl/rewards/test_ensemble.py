from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from unirl.errors import ConfigError, RewardError
from unirl.rewards import WeightedSum
from unirl.types import Sample, Scores

MakeSamples = Callable[..., list[Sample]]
NAN = float("nan")


class Fixed:
    """Gives the scores that it was made with."""

    def __init__(self, *values: float) -> None:
        self.values = np.array(values)

    def score(self, samples: Sequence[Sample]) -> Scores:
        return Scores(total=self.values, components={"part": self.values * 10})


def test_weights_are_added_and_components_named(samples: MakeSamples) -> None:
    both = WeightedSum({"one": (Fixed(1.0, 0.5), 2.0), "two": (Fixed(0.0, 1.0), 1.0)})
    scores = both.score(samples(2))
    np.testing.assert_allclose(scores.total, [2.0, 2.0])
    assert set(scores.components) == {"one", "two", "one/part", "two/part"}
    np.testing.assert_allclose(scores.components["one/part"], [10.0, 5.0])


def test_a_missing_member_is_left_out_and_the_scale_stays(samples: MakeSamples) -> None:
    both = WeightedSum({"one": (Fixed(1.0, NAN, NAN), 2.0), "two": (Fixed(NAN, 1.0, NAN), 1.0)})
    scores = both.score(samples(3))
    np.testing.assert_allclose(scores.total, [3.0, 3.0, NAN])
    assert np.isnan(scores.components["one"]).tolist() == [False, True, True]


def test_a_watched_member_changes_nothing(samples: MakeSamples) -> None:
    both = WeightedSum({"one": (Fixed(0.25, NAN), 1.0), "watched": (Fixed(NAN, 7.0), 0.0)})
    scores = both.score(samples(2))
    np.testing.assert_allclose(scores.total, [0.25, NAN])
    np.testing.assert_allclose(scores.components["watched"], [NAN, 7.0])


def test_a_penalty_has_a_negative_weight(samples: MakeSamples) -> None:
    both = WeightedSum({"one": (Fixed(1.0), 1.0), "penalty": (Fixed(0.5), -0.5)})
    np.testing.assert_allclose(both.score(samples(1)).total, [0.75])


def test_a_member_that_loses_samples_is_an_error(samples: MakeSamples) -> None:
    with pytest.raises(RewardError, match=r"reward one: .*\(1,\), wanted \(2,\)"):
        WeightedSum({"one": (Fixed(1.0), 1.0)}).score(samples(2))


@pytest.mark.parametrize("members", [{}, {"one": (Fixed(1.0), 0.0)}])
def test_no_weight_is_an_error(members: dict[str, tuple[Fixed, float]]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        WeightedSum(members)
