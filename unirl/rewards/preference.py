"""A scalar reward learnt from preferences: a vision-language model with a head of one number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unirl.errors import ConfigError
from unirl.rewards.backends.identity import network_identity
from unirl.rewards.batches import score_in_batches
from unirl.rewards.failures import Problem, account
from unirl.rewards.identity import identity_of
from unirl.rewards.pictures import fit_picture, picture_problem
from unirl.rewards.question import caption_problem
from unirl.rewards.question_model import QuestionModel
from unirl.types import Sample, Scores

__all__ = ["HEAD_FILE", "Preference", "PreferenceModel"]

HEAD_FILE = "head.safetensors"


class PreferenceModel(torch.nn.Module):
    """score = w . h + b, with h the hidden state after the last token of the question.

    Args:
        trunk: Sees the picture and reads the question; its own answers are not used.
        seed: Of the head's first weights.
    """

    def __init__(self, trunk: QuestionModel, *, seed: int = 0) -> None:
        super().__init__()
        self.trunk = trunk
        self.network = trunk.model
        width = trunk.model.config.get_text_config().hidden_size
        self.head = torch.nn.Linear(width, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.head.weight.normal_(std=width**-0.5, generator=generator)
            self.head.bias.zero_()

    def forward(self, pictures: np.ndarray, index: np.ndarray, captions: Sequence[str]) -> Tensor:
        """Score B captions with their pictures: float32 (B,).

        Args:
            pictures: Uint8 (U, H, W, 3) of the question's size.
            index: Int64 (B,), the picture of each caption.
            captions: B.
        """
        ids, mask = self.trunk.pad(self.trunk.tokenize(captions))
        features = self.trunk.look(pictures)[torch.from_numpy(index)]
        scores: Tensor = self.head(self.trunk.hidden(features, ids, mask)[:, -1])[:, 0]
        return scores

    def save(self, directory: Path) -> None:
        """Write trunk, tokenizer and picture processor as transformers does, and `head.safetensors`."""
        self.trunk.save(directory)
        save_file(
            {name: weight.contiguous() for name, weight in self.head.state_dict().items()},
            directory / HEAD_FILE,
        )

    @classmethod
    def load(cls, directory: str | Path) -> PreferenceModel:
        """Read what `save` and the question's `save` wrote, in eval mode.

        Raises:
            ConfigError: If there is no head.
        """
        directory = Path(directory)
        if not (directory / HEAD_FILE).is_file():
            raise ConfigError(
                f"{directory}: no {HEAD_FILE}, so this is no preference reward; train one with "
                "`unirl reward train --pairs`"
            )
        model = cls(QuestionModel.load(directory))
        model.head.load_state_dict(load_file(directory / HEAD_FILE))
        return model.eval()


class Preference:
    """Score by a model that was trained on which of two samples is better.

    The difference of two scores is the log-odds that the first is preferred (Bradley-Terry); a single score
    has no unit and no zero of its own.

    Args:
        model: In eval mode.
        batch_size: Samples in a forward.
        max_failed_fraction: Share of the samples of one call that may go without a score.
    """

    def __init__(
        self, model: PreferenceModel, *, batch_size: int = 128, max_failed_fraction: float = 0.1
    ) -> None:
        self.model = model
        self.batch_size = batch_size
        self.max_failed_fraction = max_failed_fraction
        self.failures: Counter[str] = Counter()
        """Samples without a score since the start, by reason."""

    @classmethod
    def load(
        cls, directory: str | Path, *, batch_size: int = 128, max_failed_fraction: float = 0.1
    ) -> Preference:
        """Read a model that `unirl reward train --pairs` wrote.

        Raises:
            ConfigError: If the directory holds no such model.
        """
        model = PreferenceModel.load(directory)
        return cls(model, batch_size=batch_size, max_failed_fraction=max_failed_fraction)

    @property
    def identity(self) -> str:
        """Another string for other weights or another question."""
        return (
            f"{network_identity(self.model)}/{identity_of('preference', asdict(self.model.trunk.question))}"
        )

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples, in their order, the same alone and in company to 1e-5.

        Raises:
            RewardError: If more than `max_failed_fraction` of the samples could not be scored.
        """
        lengths = [len(ids) for ids in self.model.trunk.tokenize([sample.caption for sample in samples])]
        total, problems = score_in_batches(
            samples, lengths, problem_of=self._problem, score=self._scores, batch_size=self.batch_size
        )
        account(
            self.failures,
            samples,
            problems,
            reward="preference",
            max_failed_fraction=self.max_failed_fraction,
        )
        return Scores(total=total, components={"preference": total.copy()})

    def _problem(self, sample: Sample, length: int) -> Problem | None:
        if (found := picture_problem(sample.image)) is not None:
            return Problem(reason="picture", text=found)
        if (marked := caption_problem(sample.caption)) is not None:
            return marked
        limit = self.model.trunk.question.max_tokens
        if length > limit:
            return Problem(reason="too long", text=f"it needs {length} tokens, the model takes {limit}")
        return None

    @torch.inference_mode()
    def _scores(self, samples: Sequence[Sample]) -> np.ndarray:
        size = self.model.trunk.question.image_size
        fitted = [fit_picture(sample.image, size) for sample in samples]
        place: dict[bytes, int] = {}
        index = np.array([place.setdefault(picture.tobytes(), len(place)) for picture in fitted])
        pictures = np.stack([fitted[list(index).index(number)] for number in range(len(place))])
        scores = self.model(pictures, index, [sample.caption for sample in samples])
        return np.asarray(scores.double().numpy())
