"""What a reward asks of a vision-language model, whatever runs it: this process, vLLM, or a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from unirl.errors import ShapeError

__all__ = [
    "CLIP_MARK",
    "IMAGE_MARK",
    "AnswerLogprobs",
    "Generation",
    "VlmBackend",
    "VlmRequest",
    "distinct_sequences",
    "finite_answers",
    "in_order",
]

IMAGE_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
"""Stands in a text where a picture belongs."""
CLIP_MARK = "<|vision_start|><|video_pad|><|vision_end|>"
"""Stands in a text where a clip belongs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VlmRequest:
    """One question about pictures and clips.

    Example: `VlmRequest(key="eval-0007", text=IMAGE_MARK + " is this a cat ?", images=(picture,))`.
    """

    key: str
    """Names the sample in errors and in the log."""
    text: str
    """What the user says. One `IMAGE_MARK` for each picture and one `CLIP_MARK` for each clip, where they
    belong. A backend puts it into the model's chat template if the model has one."""
    images: Sequence[np.ndarray] = ()
    """uint8 (H, W, 3) RGB each, in the order of their marks. Sizes may differ."""
    clips: Sequence[np.ndarray] = ()
    """uint8 (F, H, W, 3) RGB each, in the order of their marks."""
    reply: str = ""
    """How the model's answer begins, for example its reasoning; what is asked for comes after it."""

    def __post_init__(self) -> None:
        for name, mark, media in (("pictures", IMAGE_MARK, self.images), ("clips", CLIP_MARK, self.clips)):
            if self.text.count(mark) != len(media):
                raise ShapeError(
                    f"request {self.key}: {len(media)} {name} but {self.text.count(mark)} marks {mark}; "
                    "wanted one mark in the text for each"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLogprobs:
    """How likely each of N answers is after each of B requests."""

    logprobs: np.ndarray
    """float64 (B, N), nats, over the whole vocabulary and at temperature 1. NaN where there is no number."""
    is_bound: np.ndarray
    """bool (B, N), True where the server named too few tokens and the number is only an upper bound."""
    problems: Mapping[int, str] = field(default_factory=dict)
    """Requests without numbers, and why: "timeout", "too long: 90 tokens, the model takes 64", ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the model said after a request."""

    text: str
    token_logprobs: tuple[float, ...]
    """Nats of each token that was said, over the whole vocabulary and at temperature 1."""
    truncated: bool
    """Cut by `max_new_tokens` rather than ended."""
    problem: str = ""
    """Why there is no text; "" if there is one."""

    @classmethod
    def none(cls, problem: str) -> Generation:
        """Nothing was said, and why."""
        return cls(text="", token_logprobs=(), truncated=False, problem=problem)


class VlmBackend(Protocol):
    """A model that answers. B requests are answered in their order, the same alone and in company to 1e-5."""

    @property
    def identity(self) -> str:
        """Names model and weights; another string for other weights. The key of the score cache."""
        ...

    def answer_logprobs(
        self, requests: Sequence[VlmRequest], answers: Sequence[Sequence[str]]
    ) -> AnswerLogprobs:
        """Say how likely each answer comes next.

        Args:
            requests: B questions.
            answers: N answers, each a group of spellings ("yes", " Yes", ...). The probability of an answer
                is the sum over its spellings; a spelling may be several tokens, and spellings that are the
                same tokens, or that begin with another of the group, count once.

        Raises:
            ConfigError: If the vocabulary has no spelling of an answer.
            RewardError: If more requests failed than the backend's budget allows.
        """
        ...

    def generate(
        self,
        requests: Sequence[VlmRequest],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Let the model speak: B generations, in the order of the requests.

        Args:
            requests: B questions.
            max_new_tokens: Limit of the answer.
            temperature: 0 takes the most likely token.
            seed: Decides the samples where the temperature is not 0.
            stop: Texts that end the answer; the text returned ends before them.
        """
        ...

    def close(self) -> None:
        """Give back what the backend holds: memory, connections."""
        ...


def distinct_sequences(sequences: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Token sequences without doubles and without those that begin with another one, shortest first.

    The probability that a text begins with any of the given sequences is the sum over what is returned.
    """
    kept: list[tuple[int, ...]] = []
    for sequence in sorted({tuple(sequence) for sequence in sequences}, key=lambda ids: (len(ids), ids)):
        if sequence and not any(sequence[: len(shorter)] == shorter for shorter in kept):
            kept.append(sequence)
    return kept


def finite_answers(logprobs: np.ndarray, problems: Mapping[int, str]) -> AnswerLogprobs:
    """Exact numbers as an answer; a request with one that is not finite becomes a problem.

    Args:
        logprobs: float64 (B, N), changed in place. Rows of requests in `problems` hold NaN.
        problems: Requests without numbers, and why.
    """
    found = dict(problems)
    for index in np.flatnonzero(~np.isfinite(logprobs).all(axis=1)).tolist():
        found.setdefault(index, "the model gave no finite number")
        logprobs[index] = np.nan
    is_bound = np.zeros(logprobs.shape, bool)
    return AnswerLogprobs(logprobs=logprobs, is_bound=is_bound, problems=dict(sorted(found.items())))


def in_order(said: Mapping[int, Generation], problems: Mapping[int, str]) -> list[Generation]:
    """Generations and problems, by the index of their requests, as one list."""
    whole = {**said, **{index: Generation.none(problem) for index, problem in problems.items()}}
    return [whole[index] for index in range(len(whole))]
