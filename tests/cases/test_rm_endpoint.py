"""Rows RM-07 and RM-08 of the case list: scorers behind an endpoint that fails."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.faulty_endpoint import Faults, Seen, logprob_of, make_app, serving
from unirl.errors import RewardError
from unirl.rewards.backends import VlmRequest
from unirl.rewards.backends.endpoint import EndpointBackend
from unirl.rewards.backends.replicas import RetryPolicy

FAST = RetryPolicy(attempts=10, timeout_s=0.5, first_wait_s=0.001, max_wait_s=0.02)
ANSWERS = (("yes", "Yes"), ("no",))


def requests(num: int) -> list[VlmRequest]:
    return [VlmRequest(key=f"sample-{row}", text=f"question {row}") for row in range(num)]


def test_rm_07_a_failing_scorer_gives_missing_scores_and_never_zero() -> None:
    values = {"question 3": math.nan, "question 5": None, "question 7": "0.7", "question 9": True}
    always = {"question 11": 500, "question 13": 429, "question 15": 400}
    faults = Faults(errors=0.3, timeouts=0.01, values=values, always=always, hang_s=2.0)
    with serving(make_app(faults, Seen())) as url:
        backend = EndpointBackend([url], retries=FAST, max_failed_fraction=0.2)
        answered = backend.answer_logprobs(requests(60), ANSWERS)
        backend.close()
    failed = {3, 5, 7, 9, 11, 13, 15}
    assert set(answered.problems) == failed
    for row in range(60):
        if row in failed:
            assert np.isnan(answered.logprobs[row]).all()
        else:
            assert answered.logprobs[row, 0] == pytest.approx(logprob_of(f"question {row}"))
    assert "nan" in answered.problems[3] and "'0.7'" in answered.problems[7]
    assert "HTTP 500 in 10 tries" in answered.problems[11] and "HTTP 400" in answered.problems[15]


def test_rm_07_a_scorer_that_is_out_stops_the_call() -> None:
    faults, seen = Faults(errors=1.0), Seen()
    few = RetryPolicy(attempts=2, timeout_s=0.5, first_wait_s=0.001)
    with serving(make_app(faults, seen)) as url:
        backend = EndpointBackend([url], retries=few, concurrency=4, max_failed_fraction=0.05)
        with pytest.raises(RewardError, match=r"of 100 requests failed .* the budget is 5%: .*HTTP 500"):
            backend.answer_logprobs(requests(100), ANSWERS)
        backend.close()
    assert len(seen.tries) < 40  # it did not ask on until the end


@pytest.mark.slow
def test_rm_08_a_thousand_requests_are_answered_once_each_and_in_order() -> None:
    faults, seen = Faults(errors=0.1, doubled=0.05, swapped=0.05, timeouts=0.002, hang_s=2.0), Seen()
    with serving(make_app(faults, seen)) as first, serving(make_app(faults, seen, seed=1)) as second:
        backend = EndpointBackend([first, second], retries=FAST, concurrency=16)
        answered = backend.answer_logprobs(requests(1000), ANSWERS)
        backend.close()
    assert not answered.problems
    expected = [logprob_of(f"question {row}") for row in range(1000)]
    np.testing.assert_allclose(answered.logprobs[:, 0], expected)
    assert len(seen.tries) == 1000  # one id a sample, over all of its tries
    assert max(seen.tries.values()) > 1
    assert seen.most_at_once <= 16


def test_rm_02_a_server_that_names_five_tokens_gives_a_bound_and_not_zero() -> None:
    with serving(make_app(Faults(), Seen())) as url:
        backend = EndpointBackend([url], retries=FAST)
        answered = backend.answer_logprobs(requests(2), [("yes",), ("never",)])
        backend.close()
    assert answered.is_bound.tolist() == [[False, True]] * 2
    assert answered.logprobs[:, 1] == pytest.approx(-3.0)
