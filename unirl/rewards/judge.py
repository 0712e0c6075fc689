"""A vision-language model that reasons first and then gives its verdict."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from unirl.errors import ConfigError
from unirl.rewards.backends.base import IMAGE_MARK, Generation, VlmBackend, VlmRequest
from unirl.rewards.failures import Problem, account
from unirl.rewards.identity import identity_of
from unirl.rewards.question import CAPTION, Question
from unirl.rewards.vlm import backend_problem
from unirl.types import Sample, Scores

__all__ = ["Verdict", "VlmJudge"]

logger = logging.getLogger("unirl.rewards")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the judge is asked, how long it may reason, and what its verdict looks like."""

    question: Question = Question(  # noqa: RUF009  (frozen)
        template=(
            f"{IMAGE_MARK} Does this picture show {CAPTION} ? Reason step by step about what you see, "
            "then end with a line `Verdict: yes` or `Verdict: no`."
        ),
        image_size=(448, 448),
        max_tokens=4096,
    )
    """Its `yes` and `no` are the verdicts; its `normalization` holds for `kind` "logprob"."""
    kind: Literal["logprob", "grade"] = "logprob"
    """"logprob": log-probability of the yes verdict after the reasoning, of both verdicts with "pair".
    "grade": the number that the verdict says."""
    opening: str = "\nVerdict:"
    """Ends the reasoning and opens the verdict."""
    grades: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest grade; mapped to 0 and 1. Another one is invalid."""
    max_reasoning_tokens: int = 256
    max_verdict_tokens: int = 8
    """For a grade."""
    temperature: float = 0.0
    """Of the reasoning; the verdict is read at 1."""

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in ("logprob", "grade"):
            problems.append(f'kind is "{self.kind}", wanted "logprob" or "grade"')
        if not self.opening.strip():
            problems.append("opening is empty, wanted the words that open the verdict")
        if not self.grades[0] < self.grades[1]:
            problems.append(f"grades are {self.grades}, wanted (low, high) with low < high")
        if min(self.max_reasoning_tokens, self.max_verdict_tokens) < 1:
            problems.append("max_reasoning_tokens and max_verdict_tokens must be 1 or more")
        if problems:
            raise ConfigError("verdict: " + "; ".join(problems))


class VlmJudge:
    """Let a model reason about a picture and score by the verdict that follows.

    The model says its reasoning r. Then, with the reasoning and `opening` as the start of its reply:

        kind "logprob", normalization "pair":        judge = log p(yes | r) - log (p(yes | r) + p(no | r))
        kind "logprob", normalization "vocabulary":  judge = log p(yes | r)
        kind "grade":                                judge = (grade - low) / (high - low)

    Log-probabilities are nats, at most 0, over the whole vocabulary. Components are `judge`, `judge_mass` =
    p(yes | r) + p(no | r) for "logprob", and `judge_tokens`, how many tokens the reasoning had.

    A verdict is invalid, and the sample has no score, if the reasoning is empty or was cut off by its limit,
    or the grade is no number in the range. `failures` counts these with all other reasons.

    This is a reward, to be trained on; the judge that measures success is another object and another model.

    Args:
        backend: Runs the model.
        verdict: What is asked.
        name: Of the component.
        seed: Of the reasoning, where its temperature is not 0.
        max_failed_fraction: Share of the samples of one call that may go without a score.
    """

    def __init__(
        self,
        backend: VlmBackend,
        verdict: Verdict | None = None,
        *,
        name: str = "judge",
        seed: int = 0,
        max_failed_fraction: float = 0.1,
    ) -> None:
        self.backend = backend
        self.verdict = verdict or Verdict()
        self.name = name
        self.seed = seed
        self.max_failed_fraction = max_failed_fraction
        self.failures: Counter[str] = Counter()
        """Samples without a score since the start, by reason."""
        self.reasoning: list[str] = []
        """What the model said about each sample of the last call, "" where it said nothing."""

    @property
    def identity(self) -> str:
        """Another string for other weights or another verdict."""
        return f"{self.backend.identity}/{identity_of(self.name, [asdict(self.verdict), self.seed])}"

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples, in their order.

        Raises:
            RewardError: If more than `max_failed_fraction` of the samples could not be scored.
        """
        problems: dict[int, Problem] = {}
        requests: dict[int, VlmRequest] = {}
        for row, sample in enumerate(samples):
            asked = self.verdict.question.request(sample)
            if isinstance(asked, Problem):
                problems[row] = asked
            else:
                requests[row] = asked
        values = np.full((3, len(samples)), np.nan)
        self.reasoning = [""] * len(samples)
        reasoned = self._reason(requests, values, problems)
        if reasoned and self.verdict.kind == "logprob":
            self._read_logprobs(reasoned, values, problems)
        elif reasoned:
            self._read_grades(reasoned, values, problems)
        values[:2, list(problems)] = np.nan
        account(
            self.failures,
            samples,
            problems,
            reward=self.name,
            max_failed_fraction=self.max_failed_fraction,
        )
        components = {self.name: values[0], f"{self.name}_tokens": values[2]}
        if self.verdict.kind == "logprob":
            components[f"{self.name}_mass"] = values[1]
        return Scores(total=values[0].copy(), components=components)

    def _reason(
        self, requests: Mapping[int, VlmRequest], values: np.ndarray, problems: dict[int, Problem]
    ) -> dict[int, VlmRequest]:
        """Let the model reason; the requests with its reasoning as the start of the reply."""
        if not requests:
            return {}
        said = self.backend.generate(
            list(requests.values()),
            max_new_tokens=self.verdict.max_reasoning_tokens,
            temperature=self.verdict.temperature,
            seed=self.seed,
            stop=[self.verdict.opening.strip()],
        )
        reasoned = {}
        for (row, request), generation in zip(requests.items(), said, strict=True):
            self.reasoning[row] = generation.text
            values[2, row] = len(generation.token_logprobs)
            if (problem := self._invalid(generation)) is not None:
                problems[row] = problem
            else:
                reasoned[row] = replace(request, reply=generation.text.rstrip() + self.verdict.opening)
        return reasoned

    def _invalid(self, generation: Generation) -> Problem | None:
        if generation.problem:
            return backend_problem(generation.problem)
        if generation.truncated:
            limit = self.verdict.max_reasoning_tokens
            return Problem(reason="invalid verdict", text=f"the reasoning was not done after {limit} tokens")
        if not generation.text.strip():
            return Problem(reason="invalid verdict", text="the model gave no reasoning")
        return None

    def _read_logprobs(
        self, requests: Mapping[int, VlmRequest], values: np.ndarray, problems: dict[int, Problem]
    ) -> None:
        rows = np.array(list(requests))
        question = self.verdict.question
        answered = self.backend.answer_logprobs(list(requests.values()), [question.yes, question.no])
        problems.update({int(rows[i]): backend_problem(text) for i, text in answered.problems.items()})
        missing = Problem(reason="invalid verdict", text="neither yes nor no is among the tokens named")
        problems.update({int(row): missing for row in rows[answered.is_bound.all(axis=1)]})
        log_yes, log_no = answered.logprobs.T
        with np.errstate(invalid="ignore"):
            both = np.logaddexp(log_yes, log_no)
        values[0, rows] = log_yes - both if question.normalization == "pair" else log_yes
        values[1, rows] = np.exp(both)

    def _read_grades(
        self, requests: Mapping[int, VlmRequest], values: np.ndarray, problems: dict[int, Problem]
    ) -> None:
        said = self.backend.generate(list(requests.values()), max_new_tokens=self.verdict.max_verdict_tokens)
        low, high = self.verdict.grades
        for row, generation in zip(requests, said, strict=True):
            grade = parsed_grade(generation.text)
            if generation.problem:
                problems[row] = backend_problem(generation.problem)
            elif grade is None or not low <= grade <= high:
                text = f"the verdict is {generation.text.strip()!r}, wanted a grade from {low:g} to {high:g}"
                problems[row] = Problem(reason="invalid verdict", text=text)
            else:
                values[0, row] = (grade - low) / (high - low)


def parsed_grade(text: str) -> float | None:
    """The number with which a verdict begins, as in " 7", "7.5" or "**7** / 10"; None if there is none."""
    found = re.match(r"[\s*_`\"'(\[]*(-?\d+(?:\.\d+)?)(?![\w.]*\w)", text)
    return None if found is None else float(found.group(1))
