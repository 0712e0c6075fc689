from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unirl.rewards.fake_backend import FakeBackend
from unirl.errors import ConfigError
from unirl.rewards import Question, Verdict, VlmJudge
from unirl.rewards.backends import IMAGE_MARK
from unirl.rewards.judge import parsed_grade
from unirl.rewards.question_model import QuestionModel
from unirl.types import Sample

MakeSamples = Callable[..., list[Sample]]


def test_the_verdict_is_read_after_the_reasoning(samples: MakeSamples) -> None:
    """Yes at 0.6 and no at 0.2: log 0.75 of both, log 0.6 of the whole vocabulary."""
    backend = FakeBackend(0.6, 0.2, says=["I see a circle. "])
    judge = VlmJudge(backend)
    scores = judge.score(samples(2))
    np.testing.assert_allclose(scores.total, np.log(0.75))
    np.testing.assert_allclose(scores.components["judge_mass"], 0.8)
    np.testing.assert_allclose(scores.components["judge_tokens"], 4)
    assert [request.reply for request in backend.asked] == ["I see a circle.\nVerdict:"] * 2
    assert judge.reasoning == ["I see a circle. "] * 2
    question = replace(Verdict().question, normalization="vocabulary")
    whole = VlmJudge(FakeBackend(0.6, 0.2, says=["so"]), Verdict(question=question)).score(samples(1))
    np.testing.assert_allclose(whole.total, np.log(0.6))


def test_a_grade_is_parsed_and_scaled(samples: MakeSamples) -> None:
    verdict = Verdict(kind="grade", grades=(0.0, 10.0))
    scores = VlmJudge(FakeBackend(says=["well", " 7.5 / 10"]), verdict).score(samples(2))
    np.testing.assert_allclose(scores.total, 0.75)
    assert "judge_mass" not in scores.components


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        (" 7", 7.0),
        ("7.5.", 7.5),
        ("**8** of 10", 8.0),
        ("-1", -1.0),
        ("7/10", 7.0),
        ("seven", None),
        ("7th", None),
        ("good: 7", None),
        ("", None),
    ],
)
def test_grades(text: str, grade: float | None) -> None:
    assert parsed_grade(text) == grade


@pytest.mark.parametrize(
    ("backend", "kind", "words"),
    [
        (FakeBackend(0.5, 0.5, says=["and so"], truncated=True), "logprob", "was not done after 256 tokens"),
        (FakeBackend(0.5, 0.5, says=["  "]), "logprob", "gave no reasoning"),
        (FakeBackend(0.1, 0.1, says=["so"], bound=(True, True)), "logprob", "neither yes nor no"),
        (FakeBackend(says=["so", "eleven"]), "grade", "verdict is 'eleven', wanted a grade from 0 to 10"),
        (FakeBackend(says=["so", "11"]), "grade", "verdict is '11'"),
    ],
)
def test_invalid_verdicts_are_counted(
    samples: MakeSamples, caplog: pytest.LogCaptureFixture, backend: FakeBackend, kind: str, words: str
) -> None:
    judge = VlmJudge(backend, Verdict(kind=kind), max_failed_fraction=1.0)  # type: ignore[arg-type]
    assert np.isnan(judge.score(samples(2)).total).all()
    assert judge.failures == {"invalid verdict": 2}
    assert words in caplog.text


def test_all_that_is_wrong_with_a_verdict_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"kind is .*opening is empty.*grades are"):
        Verdict(kind="mood", opening=" ", grades=(1.0, 1.0))  # type: ignore[arg-type]


def test_a_real_model_judges_alone_as_in_company(tiny_vlm: Path, samples: MakeSamples) -> None:
    """An untrained model rambles until its limit; with an end that it reaches, its verdict is read."""
    backend = QuestionModel.load(tiny_vlm).backend()
    said = backend.generate([_request(sample) for sample in samples(1)], max_new_tokens=1)[0].text
    question = Question(template=f"{IMAGE_MARK} does this picture show {{caption}} ?")
    verdict = Verdict(question=question, max_reasoning_tokens=4, opening=f"{said} circle")
    judge = VlmJudge(backend, verdict, max_failed_fraction=1.0)
    given = samples(6)
    together = judge.score(given).total
    alone = np.concatenate([judge.score([sample]).total for sample in given])
    np.testing.assert_allclose(alone, together, atol=1e-5)


def _request(sample: Sample) -> Any:
    return Question().request(sample)
