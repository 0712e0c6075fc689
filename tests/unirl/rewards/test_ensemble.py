from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from unirl.errors import ConfigError, RewardError
from unirl.rewards import Ensemble, Member
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
    both = Ensemble({"one": (Fixed(1.0, 0.5), 2.0), "two": (Fixed(0.0, 1.0), 1.0)})
    scores = both.score(samples(2))
    np.testing.assert_allclose(scores.total, [2.0, 2.0])
    assert set(scores.components) == {"one", "two", "one/part", "two/part"}
    np.testing.assert_allclose(scores.components["one/part"], [10.0, 5.0])


def test_a_missing_member_is_left_out_and_the_scale_stays(samples: MakeSamples) -> None:
    both = Ensemble({"one": (Fixed(1.0, NAN, NAN), 2.0), "two": (Fixed(NAN, 1.0, NAN), 1.0)})
    scores = both.score(samples(3))
    np.testing.assert_allclose(scores.total, [3.0, 3.0, NAN])
    assert np.isnan(scores.components["one"]).tolist() == [False, True, True]


def test_a_watched_member_changes_nothing(samples: MakeSamples) -> None:
    both = Ensemble({"one": (Fixed(0.25, NAN), 1.0), "watched": (Fixed(NAN, 7.0), 0.0)})
    scores = both.score(samples(2))
    np.testing.assert_allclose(scores.total, [0.25, NAN])
    np.testing.assert_allclose(scores.components["watched"], [NAN, 7.0])


def test_a_penalty_has_a_negative_weight(samples: MakeSamples) -> None:
    both = Ensemble({"one": (Fixed(1.0), 1.0), "penalty": (Fixed(0.5), -0.5)})
    np.testing.assert_allclose(both.score(samples(1)).total, [0.75])


def test_a_member_that_loses_samples_is_an_error(samples: MakeSamples) -> None:
    with pytest.raises(RewardError, match=r"reward one: .*\(1,\), wanted \(2,\)"):
        Ensemble({"one": (Fixed(1.0), 1.0)}).score(samples(2))


@pytest.mark.parametrize("members", [{}, {"one": (Fixed(1.0), 0.0)}])
def test_no_weight_is_an_error(members: dict[str, tuple[Fixed, float]]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        Ensemble(members)


def same_key(samples: MakeSamples, *keys: str) -> list[Sample]:
    return [replace(sample, key=key) for sample, key in zip(samples(len(keys)), keys)]


def test_a_group_is_centred_and_scaled_by_itself(samples: MakeSamples) -> None:
    """Group p: 1, 3 -> -1, 1. Group q: equal values give 0. Group r: one sample gives 0. NaN stays."""
    member = Member(reward=Fixed(1.0, 3.0, NAN, 7.0, 7.0, 9.0), normalization="group")
    scores = Ensemble({"one": member}).score(same_key(samples, "p", "p", "p", "q", "q", "r"))
    np.testing.assert_allclose(scores.total, [-1, 1, NAN, 0, 0, 0])
    np.testing.assert_allclose(scores.components["one"], [1, 3, NAN, 7, 7, 9])


def test_rounding_is_no_spread(samples: MakeSamples) -> None:
    values = np.float32([0.35, 0.35, 0.35]).astype(np.float64) + np.array([0.0, 1e-8, -1e-8])
    member = Member(reward=Fixed(*values), normalization="group")
    np.testing.assert_array_equal(Ensemble({"a": member}).score(same_key(samples, "p", "p", "p")).total, 0)


def test_ranks_go_from_0_to_1_and_ties_share_their_place(samples: MakeSamples) -> None:
    member = Member(reward=Fixed(5.0, 1.0, 5.0, 9.0, 2.0), normalization="rank")
    scores = Ensemble({"one": member}).score(same_key(samples, "p", "p", "p", "p", "q"))
    np.testing.assert_allclose(scores.total, [0.5, 0.0, 0.5, 1.0, 0.5])


def test_running_statistics_move_with_adapt_alone_and_are_saved(samples: MakeSamples) -> None:
    """Of 1, 3 and then 5, 7: mean 4, population deviation sqrt(5)."""

    def make() -> Ensemble:
        return Ensemble({"one": Member(reward=Fixed(4.0, 9.0), normalization="running")})

    ensemble, given = make(), samples(2)
    np.testing.assert_allclose(ensemble.score(given).total, [4, 9], err_msg="nothing is known yet")
    for values in ([1.0, NAN, 3.0], [5.0, 7.0], [NAN]):
        ensemble.adapt(Scores(total=np.array(values), components={"one": np.array(values)}))
    expected = [0.0, 5 / np.sqrt(5)]
    np.testing.assert_allclose(ensemble.score(given).total, expected)
    np.testing.assert_allclose(ensemble.score(given).total, expected, err_msg="scoring moves nothing")
    other = make()
    other.load_state_dict(json.loads(json.dumps(ensemble.state_dict())))
    np.testing.assert_array_equal(other.score(given).total, ensemble.score(given).total)
    with pytest.raises(ConfigError, match="state of one, running statistics of no member"):
        Ensemble({"one": (Fixed(1.0), 1.0)}).load_state_dict(ensemble.state_dict())


def test_a_clip_cuts_after_the_normalisation(samples: MakeSamples) -> None:
    member = Member(reward=Fixed(-9.0, 0.5, NAN), clip=(-1.0, 1.0), weight=2.0)
    np.testing.assert_allclose(Ensemble({"one": member}).score(samples(3)).total, [-2.0, 1.0, NAN])


def test_the_worst_of_those_that_scored(samples: MakeSamples) -> None:
    members = {"one": (Fixed(1.0, 0.2, NAN, NAN), 1.0), "two": (Fixed(0.5, NAN, 0.7, NAN), 1.0)}
    watched = {"watched": (Fixed(-5.0, -5.0, -5.0, -5.0), 0.0)}
    total = Ensemble({**members, **watched}, combine="worst").score(samples(4)).total
    np.testing.assert_allclose(total, [0.5, 0.2, 0.7, NAN])


def test_disagreement_costs_its_deviation(samples: MakeSamples) -> None:
    """Members at 1 and 0: deviation 0.5. A single score has none."""
    members = {"one": (Fixed(1.0, 0.6, 0.4), 0.5), "two": (Fixed(0.0, 0.6, NAN), 0.5)}
    total = Ensemble(members, disagreement_penalty=0.4).score(samples(3)).total
    np.testing.assert_allclose(total, [0.5 - 0.2, 0.6, 0.4])


def test_all_that_is_wrong_is_said_at_once() -> None:
    members = {"a": Member(reward=Fixed(1.0), clip=(1.0, 1.0)), "b": (Fixed(1.0), -1.0)}
    with pytest.raises(ConfigError, match=r"disagreement_penalty is -1.*a: clip is .*b: weight -1"):
        Ensemble(members, combine="worst", disagreement_penalty=-1)
