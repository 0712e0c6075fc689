"""The reward of pictures with words, made of up to three models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unirl.errors import ConfigError
from unirl.rewards import EmbeddingSimilarity, Ensemble, Member, Preference, Question, VlmYesNo
from unirl.rewards.backends.endpoint import EndpointBackend
from unirl.trainer.recipe import model_path
from unirl.types import Reward

__all__ = ["PictureScoring"]

TOKEN_VARIABLE = "UNIRL_REWARD_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureScoring:
    """Does the picture show the words (VQA), do people like it (HPS), and which of two would they take?"""

    endpoints: tuple[str, ...] = ()
    """Servers of a vision-language model, up to /v1, which answer yes or no; the token is that of
    UNIRL_REWARD_TOKEN. Replicas of one model."""
    vqa: str = ""
    """Folder of a yes/no reward that answers in this process instead."""
    vqa_weight: float = 1.0
    question_image_size: int = 448
    """Side to which pictures are scaled and padded for the endpoints."""
    question_tokens: int = 512
    """Longest question to the endpoints, picture included."""
    similarity: str = ""
    """Folder of a CLIP in the form of transformers, such as HPSv2.1 or PickScore; "" leaves it out."""
    similarity_weight: float = 0.5
    preference: str = ""
    """Folder of a preference reward, as `unirl reward train --pairs` writes it; "" leaves it out."""
    preference_weight: float = 0.5
    normalization: Literal["none", "running", "group", "rank"] = "running"
    """Of each model's scores before they are added; their units differ."""
    disagreement_penalty: float = 0.0

    def reward(self, model: Path) -> Reward:
        """Load the models.

        Raises:
            ConfigError: If no model is named, or two are for the same question.
        """
        members: dict[str, Reward] = {}
        if self.endpoints and self.vqa:
            raise ConfigError("scoring: endpoints and vqa both answer the question; name one of them")
        if self.endpoints:
            members["vqa"] = VlmYesNo(self._backend(), self._question())
        if self.vqa:
            members["vqa"] = VlmYesNo.load(model_path(self.vqa, model.parent))
        if self.similarity:
            members["similarity"] = EmbeddingSimilarity.load(model_path(self.similarity, model.parent))
        if self.preference:
            members["preference"] = Preference.load(model_path(self.preference, model.parent))
        if not members:
            raise ConfigError(
                "scoring: no reward is named; set scoring.endpoints, scoring.vqa, scoring.similarity or "
                "scoring.preference"
            )
        return Ensemble(self._weighted(members), disagreement_penalty=self.disagreement_penalty)

    def _weighted(self, members: Mapping[str, Reward]) -> dict[str, Member]:
        weights = {
            "vqa": self.vqa_weight,
            "similarity": self.similarity_weight,
            "preference": self.preference_weight,
        }
        return {
            name: Member(reward=reward, weight=weights[name], normalization=self.normalization)
            for name, reward in members.items()
        }

    def _backend(self) -> EndpointBackend:
        return EndpointBackend(list(self.endpoints), token=os.environ.get(TOKEN_VARIABLE, ""))

    def _question(self) -> Question:
        side = self.question_image_size
        return Question(image_size=(side, side), max_tokens=self.question_tokens)
