from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from unirl.errors import RewardError
from unirl.rewards import VlmYesNo
from unirl.types import Sample

MakeSamples = Callable[..., list[Sample]]


@pytest.fixture
def reward(tiny_vlm: Path) -> VlmYesNo:
    return VlmYesNo.load(tiny_vlm)


def answer_with(reward: VlmYesNo, logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the network answer every question with the same logits, float32 (V,)."""
    monkeypatch.setattr(
        reward.model, "logits", lambda features, ids, mask: logits.expand(len(ids), 1, -1).clone()
    )


def test_worked_by_hand(reward: VlmYesNo, samples: MakeSamples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two spellings of yes at 0.2 and 0.1, no at 0.1: 0.3 / 0.4 and a mass of 0.4."""
    vocabulary = len(reward.model.tokenizer)
    probabilities = torch.full((vocabulary,), 0.6 / (vocabulary - 3))
    yes, no = int(reward.model.yes_ids[0]), int(reward.model.no_ids[0])
    other = next(index for index in range(vocabulary) if index not in (yes, no))
    probabilities[yes], probabilities[other], probabilities[no] = 0.2, 0.1, 0.1
    monkeypatch.setattr(reward.model, "yes_ids", torch.tensor([yes, other]))
    answer_with(reward, probabilities.log() + 3.0, monkeypatch)
    scores = reward.score(samples(2))
    np.testing.assert_allclose(scores.total, 0.75, atol=1e-6)
    np.testing.assert_allclose(scores.components["vlm_mass"], 0.4, atol=1e-6)
    question = replace(reward.model.question, normalization="vocabulary")
    monkeypatch.setattr(reward.model, "question", question)
    np.testing.assert_allclose(reward.score(samples(2)).total, 0.3, atol=1e-6)


def test_equal_pictures_are_seen_once(
    reward: VlmYesNo, samples: MakeSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = samples(6)
    shared = [replace(sample, image=given[row // 3].image) for row, sample in enumerate(given)]
    expected = [reward.score([sample]).total[0] for sample in shared]
    seen = []
    look = reward.model.look
    monkeypatch.setattr(reward.model, "look", lambda pictures: seen.append(len(pictures)) or look(pictures))
    np.testing.assert_allclose(reward.score(shared).total, expected, atol=1e-5)
    assert seen == [2]


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
    scores = reward.score(given)
    assert np.flatnonzero(np.isnan(scores.total)).tolist() == [3]
    assert np.isnan(scores.components["vlm_mass"][3])
    assert reward.failures == {"placeholder": 1}
    assert "sample 3 (prompt-3)" in caplog.text


def test_over_budget_stops_with_every_reason(reward: VlmYesNo, samples: MakeSamples) -> None:
    given = samples(10)
    given[0] = replace(given[0], image=np.zeros((32, 0, 3), np.uint8))
    given[7] = replace(given[7], caption="red " * 60)
    with pytest.raises(RewardError, match=r"2 of 10 .*prompt-0.*no pixels.*prompt-7.*tokens.*10%"):
        reward.score(given)


def test_a_model_that_gives_nan_is_no_score(
    reward: VlmYesNo, samples: MakeSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(reward, torch.full((len(reward.model.tokenizer),), float("nan")), monkeypatch)
    with pytest.raises(RewardError, match="no finite probability"):
        reward.score(samples(3))
    reward.max_failed_fraction = 1.0
    assert np.isnan(reward.score(samples(3)).total).all()
    assert reward.failures["not finite"] == 6
