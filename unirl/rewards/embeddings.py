"""Reward by the similarity of picture and words in the space of a CLIP or SigLIP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    BaseImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from unirl.errors import ConfigError
from unirl.rewards.backends.identity import network_identity
from unirl.rewards.batches import score_in_batches
from unirl.rewards.failures import Problem, account
from unirl.rewards.pictures import picture_problem
from unirl.types import Sample, Scores

__all__ = ["EmbeddingSimilarity"]


class EmbeddingSimilarity:
    """Cosine of the angle between the embeddings of picture and caption, from -1 to 1.

    Args:
        model: A CLIP or SigLIP, or another model of transformers with `get_image_features` and
            `get_text_features`.
        tokenizer: Of the model. Captions are padded to the model's longest text, as SigLIP was trained.
        processor: Of the model's pictures.
        batch_size: Samples in a forward.
        max_failed_fraction: Share of the samples of one call that may go without a score.

    Raises:
        ConfigError: If the model has no embeddings of pictures and texts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        processor: BaseImageProcessor,
        *,
        batch_size: int = 64,
        max_failed_fraction: float = 0.1,
    ) -> None:
        for method in ("get_image_features", "get_text_features"):
            if not hasattr(model, method):
                raise ConfigError(f"{type(model).__name__} has no {method}; wanted a CLIP or SigLIP")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.processor = processor
        self.batch_size = batch_size
        self.max_failed_fraction = max_failed_fraction
        self.max_tokens: int = model.config.get_text_config().max_position_embeddings
        self.failures: Counter[str] = Counter()
        """Samples without a score since the start, by reason."""

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        batch_size: int = 64,
        device: str | torch.device = "cpu",
        max_failed_fraction: float = 0.1,
    ) -> EmbeddingSimilarity:
        """Read a model directory in the format of transformers, in float32."""
        return cls(
            AutoModel.from_pretrained(directory, dtype=torch.float32).to(device),
            AutoTokenizer.from_pretrained(directory),
            AutoImageProcessor.from_pretrained(directory),
            batch_size=batch_size,
            max_failed_fraction=max_failed_fraction,
        )

    @property
    def identity(self) -> str:
        """Another string for other weights."""
        return f"similarity/{network_identity(self.model)}"

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples, in their order, the same alone and in company to 1e-5.

        A sample has NaN if its picture cannot be scored or its caption is longer than the model takes.

        Raises:
            RewardError: If more than `max_failed_fraction` of the samples could not be scored.
        """
        texts = [sample.caption for sample in samples]
        ids = list(self.tokenizer(texts)["input_ids"]) if texts else []
        total, problems = score_in_batches(
            samples,
            [len(tokens) for tokens in ids],
            problem_of=self._problem,
            score=self._cosines,
            batch_size=self.batch_size,
        )
        account(
            self.failures,
            samples,
            problems,
            reward="similarity",
            max_failed_fraction=self.max_failed_fraction,
        )
        return Scores(total=total, components={"similarity": total.copy()})

    def _problem(self, sample: Sample, num_tokens: int) -> Problem | None:
        if (found := picture_problem(sample.image)) is not None:
            return Problem(reason="picture", text=found)
        if num_tokens > self.max_tokens:
            text = f"the caption has {num_tokens} tokens, the model takes {self.max_tokens}"
            return Problem(reason="too long", text=text)
        return None

    @torch.inference_mode()
    def _cosines(self, samples: Sequence[Sample]) -> np.ndarray:
        """Float64 (B,)."""
        device = self.model.device
        pixels = self.processor([sample.image for sample in samples], return_tensors="pt")["pixel_values"]
        text = self.tokenizer(
            [sample.caption for sample in samples],
            padding="max_length",
            max_length=self.max_tokens,
            return_tensors="pt",
        )
        names = [name for name in ("input_ids", "attention_mask") if name in text]
        pictures: Tensor = self.model.get_image_features(pixels.to(device)).pooler_output
        words: Tensor = self.model.get_text_features(**{n: text[n].to(device) for n in names}).pooler_output
        cosines = (normalize(pictures.double(), dim=-1) * normalize(words.double(), dim=-1)).sum(-1)
        return np.asarray(cosines.cpu().numpy())
