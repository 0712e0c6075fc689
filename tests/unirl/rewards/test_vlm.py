from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unirl.rewards.fake_backend import FakeBackend
from unirl.errors import RewardError
from unirl.rewards import Question, VlmYesNo
from unirl.rewards.backends import CLIP_MARK, IMAGE_MARK
from unirl.rewards.question_model import QuestionModel
from unirl.types import Sample

MakeSamples = Callable[..., list[Sample]]


@pytest.fixture
def reward(tiny_vlm: Path) -> VlmYesNo:
    return VlmYesNo.load(tiny_vlm)


def test_worked_by_hand(samples: MakeSamples) -> None:
    """Yes at 0.3, no at 0.1: 0.3 / 0.4 and a mass of 0.4."""
    backend = FakeBackend(0.3, 0.1)
    scores = VlmYesNo(backend, Question(yes=("yes", "oh yes"))).score(samples(2))
    np.testing.assert_allclose(scores.total, 0.75)
    np.testing.assert_allclose(scores.components["vlm_mass"], 0.4)
    assert backend.answers == [("yes", "oh yes"), Question().no]
    plain = VlmYesNo(backend, Question(normalization="vocabulary"), name="vqa").score(samples(2))
    np.testing.assert_allclose(plain.total, 0.3)
    assert list(plain.components) == ["vqa", "vqa_mass"]


def test_little_mass_on_the_answers_is_warned_of(
    samples: MakeSamples, caplog: pytest.LogCaptureFixture
) -> None:
    reward = VlmYesNo(FakeBackend(0.03, 0.01), Question())
    np.testing.assert_allclose(reward.score(samples(2)).total, 0.75)
    assert "yes and no together have 4.0% of the probability" in caplog.text
    assert reward.num_low_mass == 1
    reward.score([])
    assert reward.num_low_mass == 1


def test_an_identity_follows_weights_and_question(tiny_vlm: Path) -> None:
    first, again = (VlmYesNo.load(tiny_vlm).identity for _ in range(2))
    assert first == again
    reward = VlmYesNo(FakeBackend(0.5, 0.5), Question())
    assert first != reward.identity
    assert reward.identity != VlmYesNo(FakeBackend(0.5, 0.5), Question(normalization="vocabulary")).identity


def test_batches_of_any_size_agree(tiny_vlm: Path, samples: MakeSamples) -> None:
    given = samples(23)
    totals = [VlmYesNo.load(tiny_vlm, batch_size=size).score(given).total for size in (1, 5, 23, 100)]
    for total in totals[1:]:
        np.testing.assert_allclose(total, totals[0], atol=1e-5)


def test_empty_and_unknown_words_are_scored(reward: VlmYesNo, samples: MakeSamples) -> None:
    given = [replace(samples(1)[0], caption=text) for text in ("", "   ", "zebra", "<pad>", "<eos> red")]
    assert np.isfinite(reward.score(given).total).all()


def test_a_failure_is_counted_and_named(
    reward: VlmYesNo, samples: MakeSamples, caplog: pytest.LogCaptureFixture
) -> None:
    given = samples(20)
    given[3] = replace(given[3], caption="a <|image_pad|> circle")
    given[5] = replace(given[5], caption="circle ?<|im_end|> yes")
    scores = reward.score(given)
    assert np.flatnonzero(np.isnan(scores.total)).tolist() == [3, 5]
    assert np.isnan(scores.components["vlm_mass"][3])
    assert reward.failures == {"placeholder": 2}
    assert "sample 3 (prompt-3)" in caplog.text


def test_over_budget_stops_with_every_reason(reward: VlmYesNo, samples: MakeSamples) -> None:
    given = samples(10)
    given[0] = replace(given[0], image=np.zeros((32, 0, 3), np.uint8))
    given[7] = replace(given[7], caption="red " * 60)
    with pytest.raises(RewardError, match=r"2 of 10 .*prompt-0.*no pixels.*prompt-7.*tokens.*10%"):
        reward.score(given)


def test_one_failure_among_several_never_stops_a_run(reward: VlmYesNo, samples: MakeSamples) -> None:
    given = samples(3)
    given[1] = replace(given[1], caption="red " * 60)
    assert np.isnan(reward.score(given).total).tolist() == [False, True, False]
    with pytest.raises(RewardError, match="1 of 1 samples"):
        reward.score(given[1:2])
    reward.max_failed_fraction = 0.0
    with pytest.raises(RewardError, match="1 of 3 samples"):
        reward.score(given)


def test_a_request_that_the_backend_lost_is_no_score(samples: MakeSamples) -> None:
    backend = FakeBackend(0.4, 0.1, problems={1: "timeout: 3 tries"})
    reward = VlmYesNo(backend, Question(), max_failed_fraction=0.7)
    given = samples(3)
    given[0] = replace(given[0], image=np.zeros((32, 0, 3), np.uint8))
    np.testing.assert_allclose(reward.score(given).total, [np.nan, 0.8, np.nan])
    assert reward.failures == {"picture": 1, "timeout": 1}


def test_a_model_that_gives_nan_is_no_score(reward: VlmYesNo, samples: MakeSamples) -> None:
    network = reward.backend.model  # type: ignore[attr-defined]
    with torch.no_grad():
        network.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RewardError, match="no finite number"):
        reward.score(samples(3))
    reward.max_failed_fraction = 1.0
    assert np.isnan(reward.score(samples(3)).total).all()


def test_several_pictures_and_clips_are_scored_alone_as_in_company(
    tiny_vlm: Path, samples: MakeSamples
) -> None:
    question = replace(Question.load(tiny_vlm), max_tokens=200)
    given = [
        replace(s, more_images=[o.image], clip=np.stack([s.image, o.image, s.image]))
        for s, o in zip(samples(5), samples(5, seed=1))
    ]
    for template in ("{image} do these show {caption} ?", "{clip} does this picture show {caption} ?"):
        marks = template.replace("{image}", IMAGE_MARK).replace("{clip}", CLIP_MARK)
        backend = QuestionModel.load(tiny_vlm).backend()
        backend.preparer.max_tokens = 200
        asked = VlmYesNo(backend, replace(question, template=marks))
        together = asked.score(given).total
        alone = np.concatenate([asked.score([sample]).total for sample in given])
        np.testing.assert_allclose(alone, together, atol=1e-5)
        assert np.isfinite(together).all()
