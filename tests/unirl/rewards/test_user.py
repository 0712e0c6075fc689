from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unirl.rewards.user_functions import Scale, by_caption, length_and_parts
from unirl.errors import ConfigError, RewardError
from unirl.rewards import UserReward
from unirl.types import Sample

MakeSamples = Callable[..., list[Sample]]
LIMIT_S = 2.0


@pytest.fixture(scope="module")
def reward() -> Iterator[UserReward]:
    reward = UserReward(by_caption, limit_s=LIMIT_S)
    yield reward
    reward.close()


def with_captions(samples: MakeSamples, *captions: str) -> list[Sample]:
    return [replace(sample, caption=caption) for sample, caption in zip(samples(len(captions)), captions)]


@pytest.mark.parametrize(
    ("caption", "reason", "words"),
    [
        ("raise", "raised", "KeyError: 'no such colour' at user_functions.py:"),
        ("exit", "exited", "called sys.exit(3)"),
        ("end", "exited", "ended its process with exit code 0"),
        ("nan", "no score", "total is nan, wanted a finite number"),
        ("none", "no score", "total is None, wanted a number"),
        ("text", "no score", "total is '0.7 or so', wanted a number"),
    ],
)
def test_one_bad_sample_is_one_failure_with_its_reason(
    reward: UserReward,
    samples: MakeSamples,
    caplog: pytest.LogCaptureFixture,
    caption: str,
    reason: str,
    words: str,
) -> None:
    before = reward.failures[reason]
    with caplog.at_level(logging.WARNING, logger="unirl.rewards"):
        scores = reward.score(with_captions(samples, "fine", caption, "fine"))
    np.testing.assert_array_equal(scores.total, [1.0, np.nan, 1.0])
    assert reward.failures[reason] == before + 1
    assert f"sample 1 (prompt-1): {words}" in caplog.text


def test_a_process_that_ended_while_idle_costs_no_sample(reward: UserReward, samples: MakeSamples) -> None:
    """As when the system is out of memory between two steps."""
    reward.score(with_captions(samples, "fine", "fine"))
    for worker in filter(None, reward._pool._workers):
        worker.process.kill()
        worker.process.join()
    assert np.isfinite(reward.score(with_captions(samples, "fine", "fine")).total).all()


class DiesOnArrival:
    """Kills the process that unpickles it, which cannot be ready yet then."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return signal.raise_signal, (signal.SIGKILL,)


@pytest.mark.parametrize(("num_killed", "is_enough"), [(1, False), (2, False), (100, True)])
def test_a_process_that_ended_while_it_started_is_started_again_but_not_for_ever(
    samples: MakeSamples, monkeypatch: pytest.MonkeyPatch, num_killed: int, is_enough: bool
) -> None:
    """One has started before, so the function can be imported; one process, and no other is there."""
    reward = UserReward(by_caption, num_workers=1, limit_s=LIMIT_S)
    reward.score(with_captions(samples, "fine"))
    pool, started = reward._pool, []

    def start(place: int, start: Callable[[int], Any] = pool._start) -> Any:
        started.append(place)
        deadly = len(started) <= num_killed
        monkeypatch.setattr(pool, "_function", DiesOnArrival() if deadly else by_caption)
        return start(place)

    monkeypatch.setattr(pool, "_start", start)
    pool._workers[0].process.kill()
    pool._workers[0].process.join()
    with pytest.raises(ConfigError, match="ended while it started") if is_enough else nullcontext():
        assert np.isfinite(reward.score(with_captions(samples, "fine")).total).all()
    reward.close()


def test_parts_become_components(samples: MakeSamples) -> None:
    with pytest.raises(RewardError, match=r"gave 'total', 'words'; wanted 'total'; "):
        UserReward(length_and_parts, num_workers=1).score(samples(3))
    scores = UserReward(length_and_parts, parts=["words"], name="short", num_workers=1).score(samples(2))
    assert list(scores.components) == ["short", "short/words"]
    np.testing.assert_allclose(scores.components["short/words"], [3, 3])
    np.testing.assert_allclose(scores.total, [0.3, 0.3])


def test_an_object_that_can_be_called_is_a_function(samples: MakeSamples) -> None:
    scores = UserReward(Scale(0.5), num_workers=1).score(with_captions(samples, "four"))
    assert (scores.total.tolist(), list(scores.components)) == ([2.0], ["Scale"])


def test_functions_that_no_process_can_import_are_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(sample: Sample) -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"inner: it is defined inside another function.*my_rewards\.py"):
        UserReward(inner)
    with pytest.raises(ConfigError, match="lambda"):
        UserReward(lambda sample: 0.0)
    replaced = by_caption
    monkeypatch.setattr(sys.modules[by_caption.__module__], "by_caption", inner)
    with pytest.raises(ConfigError, match="by_caption is something else by now"):
        UserReward(replaced)
    monkeypatch.setattr(inner, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ConfigError, match=r"inner: it is defined in a notebook.*move `inner` into a module"):
        UserReward(inner)


def test_another_text_of_the_function_is_another_reward() -> None:
    assert UserReward(by_caption).identity == UserReward(by_caption).identity
    assert UserReward(by_caption).identity != UserReward(length_and_parts, name="by_caption").identity
