"""A model that says what it is told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unirl.rewards.backends import AnswerLogprobs, Generation, VlmRequest


class FakeBackend:
    """Answers all requests with the same probabilities, and says the texts given, one for each call."""

    identity = "fake/1"

    def __init__(
        self,
        *probabilities: float,
        bound: Sequence[bool] = (False, False),
        problems: Mapping[int, str] | None = None,
        says: Sequence[str] = (),
        truncated: bool = False,
    ) -> None:
        self.probabilities = np.array(probabilities)
        self.bound, self.problems, self.says = np.array(bound), dict(problems or {}), list(says)
        self.truncated = truncated
        self.asked: list[VlmRequest] = []
        self.answers: Sequence[Sequence[str]] = ()

    def answer_logprobs(
        self, requests: Sequence[VlmRequest], answers: Sequence[Sequence[str]]
    ) -> AnswerLogprobs:
        self.asked, self.answers = list(requests), answers
        logprobs = np.tile(np.log(self.probabilities), (len(requests), 1))
        logprobs[list(self.problems)] = np.nan
        return AnswerLogprobs(
            logprobs=logprobs,
            is_bound=np.tile(self.bound, (len(requests), 1)),
            problems=self.problems,
        )

    def generate(
        self,
        requests: Sequence[VlmRequest],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        self.asked = list(requests)
        text = self.says.pop(0)
        logprobs = (-0.1,) * len(text.split())
        return [Generation(text=text, token_logprobs=logprobs, truncated=self.truncated) for _ in requests]

    def close(self) -> None:
        """Nothing to give back."""
