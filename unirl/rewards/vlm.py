"""The vision-language reward: how sure a Qwen2.5-VL is that a picture shows its caption."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from unirl.errors import RewardError
from unirl.rewards.pictures import fit_picture, picture_problem
from unirl.rewards.question_model import QuestionModel
from unirl.types import Sample, Scores

__all__ = ["VlmYesNo"]

logger = logging.getLogger("unirl.rewards")


class VlmYesNo:
    """Ask "does this picture show {caption} ?" and score by the probability of yes.

    p(token) is the softmax over the whole vocabulary after the question. With p_yes and p_no summed over all
    spellings of yes and of no that the vocabulary holds:

        vlm      = p_yes / (p_yes + p_no)    (p_yes alone with normalization "vocabulary")
        vlm_mass = p_yes + p_no              near 1 when the model answers the question at all

    `total` is `vlm`; `vlm_mass` is kept for exploring and never trained on.

    Args:
        model: A question model, in eval mode.
        batch_size: Questions in a forward.
        max_failed_fraction: Share of the samples of one call that may go without a score.
    """

    def __init__(
        self, model: QuestionModel, *, batch_size: int = 128, max_failed_fraction: float = 0.1
    ) -> None:
        self.model = model
        self.batch_size = batch_size
        self.max_failed_fraction = max_failed_fraction
        self.failures: Counter[str] = Counter()
        """Samples without a score since the start, by reason."""

    @classmethod
    def load(
        cls, directory: str | Path, *, batch_size: int = 128, max_failed_fraction: float = 0.1
    ) -> VlmYesNo:
        """Read a model that `unirl reward train` wrote.

        Raises:
            ConfigError: If the directory holds no such model, or its vocabulary no spelling of yes or of no.
        """
        return cls(
            QuestionModel.load(directory), batch_size=batch_size, max_failed_fraction=max_failed_fraction
        )

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples, in their order, the same alone and in company to 1e-5.

        A sample has NaN in every component if its picture has no pixels or sides that differ more than 200
        times, if the question is longer than the model takes, if the caption holds a placeholder, or if
        the model gives no finite number. Words outside the vocabulary are read as `<unk>`; an empty caption
        is a caption.

        Raises:
            RewardError: If more than `max_failed_fraction` of the samples could not be scored.
        """
        questions = self.model.tokenize([sample.caption for sample in samples])
        problems: dict[int, tuple[str, str]] = {}
        for index, (sample, ids) in enumerate(zip(samples, questions)):
            if (problem := self._problem(sample, ids)) is not None:
                problems[index] = problem
        scored = sorted(set(range(len(samples))) - problems.keys(), key=lambda index: len(questions[index]))
        values = np.full((2, len(samples)), np.nan)
        for start in range(0, len(scored), self.batch_size):
            batch = scored[start : start + self.batch_size]
            values[:, batch] = self._answers([samples[i].image for i in batch], [questions[i] for i in batch])
        for index in scored:
            if not np.isfinite(values[:, index]).all():
                problems[index] = ("not finite", "the model gave no finite probability")
                values[:, index] = np.nan
        self._account(samples, problems)
        return Scores(total=values[0].copy(), components={"vlm": values[0], "vlm_mass": values[1]})

    def _problem(self, sample: Sample, ids: Sequence[int]) -> tuple[str, str] | None:
        """Why a sample cannot be scored, as a reason to count and a sentence to read; None if it can."""
        if (found := picture_problem(sample.image)) is not None:
            return "picture", found
        limit = self.model.question.max_tokens
        if len(ids) > limit:
            wanted = "shorten the caption or raise max_tokens in reward.json"
            return "too long", f"the question needs {len(ids)} tokens, the model takes {limit}; {wanted}"
        if ids.count(self.model.picture_id) != self.model.num_picture_tokens:
            return "placeholder", "the caption holds a picture placeholder"
        return None

    @torch.inference_mode()
    def _answers(self, pictures: Sequence[np.ndarray], questions: Sequence[Sequence[int]]) -> np.ndarray:
        """Float64 (2, B): the score and the mass. Equal pictures are seen once."""
        fitted = [fit_picture(picture, self.model.question.image_size) for picture in pictures]
        place: dict[bytes, int] = {}
        index = [place.setdefault(picture.tobytes(), len(place)) for picture in fitted]
        first = [index.index(number) for number in range(len(place))]
        features = self.model.look(np.stack([fitted[i] for i in first]))[torch.tensor(index)]
        ids, mask = self.model.pad(questions)
        logits = self.model.logits(features, ids, mask)[:, 0].double()
        log_total = logits.logsumexp(-1)
        log_yes = logits[:, self.model.yes_ids].logsumexp(-1)
        log_no = logits[:, self.model.no_ids].logsumexp(-1)
        mass = (log_yes - log_total).exp() + (log_no - log_total).exp()
        is_pair = self.model.question.normalization == "pair"
        score = torch.sigmoid(log_yes - log_no) if is_pair else (log_yes - log_total).exp()
        return torch.stack([score, mass]).numpy()

    def _account(self, samples: Sequence[Sample], problems: Mapping[int, tuple[str, str]]) -> None:
        """Count failures, name them in the log, and stop when there are too many."""
        if not problems:
            return
        self.failures.update(reason for reason, _ in problems.values())
        named = [f"sample {row} ({samples[row].key}): {text}" for row, (_, text) in sorted(problems.items())]
        message = f"{len(problems)} of {len(samples)} samples could not be scored: " + "; ".join(named[:5])
        if len(problems) > self.max_failed_fraction * len(samples):
            raise RewardError(f"{message}; the budget is {self.max_failed_fraction:.0%} of a call")
        logger.warning(message)
