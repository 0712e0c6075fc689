"""The vision-language reward: how sure a model is that a picture or a clip shows its caption."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from unirl.rewards.backends.base import VlmBackend, VlmRequest
from unirl.rewards.failures import Problem, account
from unirl.rewards.identity import identity_of
from unirl.rewards.question import Question
from unirl.rewards.question_model import QuestionModel
from unirl.types import Sample, Scores

__all__ = ["VlmYesNo", "backend_problem"]

logger = logging.getLogger("unirl.rewards")


class VlmYesNo:
    """Ask "does this picture show {caption} ?" and score by the probability of yes.

    With p_yes and p_no the probabilities, over the whole vocabulary, that the answer begins with any of the
    spellings of yes and of no, each of one token or of several:

        vlm      = p_yes / (p_yes + p_no)    (p_yes alone with normalization "vocabulary")
        vlm_mass = p_yes + p_no              near 1 when the model answers the question at all

    `total` is `vlm`; `vlm_mass` is kept for exploring and never trained on. A call whose mean mass is under
    `min_mass` is warned of: the model answers something else, so the question does not suit it.

    Where a server names only its likeliest tokens and one of the answers is not among them, its probability
    is an upper bound, and the score is what follows from that. Where both are missing, there is no score.

    Args:
        backend: Runs the model.
        question: What is asked.
        name: Of the component.
        min_mass: Mean of `vlm_mass` in a call under which a warning is given.
        max_failed_fraction: Share of the samples of one call that may go without a score.
    """

    def __init__(
        self,
        backend: VlmBackend,
        question: Question,
        *,
        name: str = "vlm",
        min_mass: float = 0.5,
        max_failed_fraction: float = 0.1,
    ) -> None:
        self.backend = backend
        self.question = question
        self.name = name
        self.min_mass = min_mass
        self.max_failed_fraction = max_failed_fraction
        self.failures: Counter[str] = Counter()
        """Samples without a score since the start, by reason."""
        self.num_bounded = 0
        """Scores since the start that rest on an upper bound of one of the two answers."""
        self.num_low_mass = 0
        """Calls since the start with a mean mass under `min_mass`."""

    @classmethod
    def load(
        cls, directory: str | Path, *, batch_size: int = 128, max_failed_fraction: float = 0.1
    ) -> VlmYesNo:
        """Read a model that `unirl reward train` wrote, to run in this process.

        Raises:
            ConfigError: If the directory holds no such model, its vocabulary no spelling of yes or of no, or
                the question is longer than its own limit.
        """
        model = QuestionModel.load(directory)
        return cls(
            model.backend(batch_size=batch_size), model.question, max_failed_fraction=max_failed_fraction
        )

    @property
    def identity(self) -> str:
        """Another string for other weights or another question."""
        return f"{self.backend.identity}/{identity_of(self.name, asdict(self.question))}"

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples, in their order, the same alone and in company to 1e-5.

        A sample has NaN in every component if it has no picture or clip that can be shown, if the question is
        longer than the model takes, if the caption holds a mark of the model's own, or if the model gives no
        finite number. An empty caption is a caption.

        Raises:
            RewardError: If more than `max_failed_fraction` of the samples could not be scored.
        """
        problems: dict[int, Problem] = {}
        requests: dict[int, VlmRequest] = {}
        for row, sample in enumerate(samples):
            asked = self.question.request(sample)
            if isinstance(asked, Problem):
                problems[row] = asked
            else:
                requests[row] = asked
        values = np.full((2, len(samples)), np.nan)
        if requests:
            self._ask(requests, values, problems)
        account(
            self.failures,
            samples,
            problems,
            reward=self.name,
            max_failed_fraction=self.max_failed_fraction,
        )
        self._watch(values[1])
        components = {self.name: values[0], f"{self.name}_mass": values[1]}
        return Scores(total=values[0].copy(), components=components)

    def _ask(self, requests: dict[int, VlmRequest], values: np.ndarray, problems: dict[int, Problem]) -> None:
        """Fill in the score and the mass of each request, float64 (2, B), or why there is none."""
        rows = np.array(list(requests))
        answered = self.backend.answer_logprobs(
            list(requests.values()), [self.question.yes, self.question.no]
        )
        problems.update({int(rows[i]): backend_problem(text) for i, text in answered.problems.items()})
        is_lost = np.asarray(answered.is_bound.all(axis=1))
        lost = Problem(reason="no answer", text="neither yes nor no is among the tokens named")
        problems.update({int(row): lost for row in rows[is_lost] if int(row) not in problems})
        self.num_bounded += int((answered.is_bound.any(axis=1) & ~is_lost).sum())
        log_yes, log_no = np.where(is_lost[:, None], np.nan, answered.logprobs).T
        if self.question.normalization == "pair":
            with np.errstate(invalid="ignore"):
                values[0, rows] = np.exp(-np.logaddexp(0.0, log_no - log_yes))
        else:
            values[0, rows] = np.exp(log_yes)
        values[1, rows] = np.exp(log_yes) + np.exp(log_no)

    def _watch(self, masses: np.ndarray) -> None:
        known = masses[~np.isnan(masses)]
        if len(known) and known.mean() < self.min_mass:
            self.num_low_mass += 1
            logger.warning(
                "%s: yes and no together have %.1f%% of the probability, in one sample %.1f%%; the model "
                "answers something else, so its score means little: ask another question",
                self.name,
                100 * known.mean(),
                100 * known.min(),
            )


def backend_problem(text: str) -> Problem:
    """What a backend said of a request, "reason: the rest"."""
    return Problem(reason=text.split(":")[0], text=text)
