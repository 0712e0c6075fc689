"""A recipe: everything that makes a run, as one frozen value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from datapipe import ClipField
from unirl.errors import ConfigError
from unirl.policies.image_tokenizer import ImageTokenizerConfig
from unirl.policies.token_lm import PolicyConfig
from unirl.rewards import VlmConfig
from unirl.trainer.scoring import ModelAlone, Scoring
from unirl.trainer.stages import RunSettings, Stage
from unirl.types import Judge

__all__ = [
    "Data",
    "ModelAlone",
    "Models",
    "Recipe",
    "RewardTraining",
    "Scoring",
    "SupervisedTraining",
    "TokenizerTraining",
    "is_made",
    "model_path",
]


class Data(Protocol):
    """Where pictures and captions come from, and who judges what the policy makes of them."""

    def sources(self, directory: Path, *, seed: int) -> Sequence[Path]:
        """Return what to ingest: folders, tars or tables. May write them under `directory` first."""
        ...

    def captions(self) -> Sequence[str]:
        """Return captions that hold every word the policy may need."""
        ...

    def judge(self, *, seed: int) -> Judge:
        """Return the held-out judge."""
        ...


def _require_training(steps: int, batch_size: int, learning_rate: float) -> None:
    """Refuse numbers with which nothing is trained, all at once."""
    wrong = [
        f"{name} is {value}, wanted 1 or more"
        for name, value in (("steps", steps), ("batch_size", batch_size))
        if value < 1
    ]
    if not learning_rate > 0:
        wrong.append(f"learning_rate is {learning_rate}, wanted a number above 0")
    if wrong:
        raise ConfigError("; ".join(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerTraining:
    """How the image tokenizer is trained."""

    config: ImageTokenizerConfig = field(default_factory=ImageTokenizerConfig)
    steps: int = 300
    batch_size: int = 32
    learning_rate: float = 3e-3
    model: str | None = None
    """Folder of an image tokenizer to take instead of training one."""

    def __post_init__(self) -> None:
        _require_training(self.steps, self.batch_size, self.learning_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedTraining:
    """How the policy is warmed up."""

    config: PolicyConfig = field(default_factory=PolicyConfig)
    steps: int = 400
    batch_size: int = 64
    text_fraction: float = 0.125
    """Share of each batch that is learnt from picture to words as well as from words to picture."""
    unconditional_fraction: float = 0.0
    """Share of each batch that is drawn without its caption, as guidance needs; see `train_supervised`."""
    learning_rate: float = 5e-3
    model: str | None = None
    """Folder of a policy to take instead of warming one up; its codes are those of the run's tokenizer."""

    def __post_init__(self) -> None:
        _require_training(self.steps, self.batch_size, self.learning_rate)
        for name in ("text_fraction", "unconditional_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, wanted 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTraining:
    """How the yes/no reward model is trained."""

    config: VlmConfig = field(default_factory=VlmConfig)
    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 5e-3
    model: str | None = None
    """Folder of a reward model to take instead of training one, such as the next version of a run's own."""

    def __post_init__(self) -> None:
        _require_training(self.steps, self.batch_size, self.learning_rate)


class Models(Protocol):
    """Models that a run starts from and that are made when it starts, such as random ones of real classes.

    A frozen dataclass, so that the run's record names its settings.
    """

    def write(self, directory: Path, *, seed: int) -> None:
        """Write each model into a folder of its own. Settings name them as "{models}/start/FOLDER"."""
        ...


MADE = "{models}"


def model_path(folder: str, models: Path) -> Path:
    """Where a model lies that a setting names: "{models}" stands for the run's folder of models."""
    return Path(folder.replace(MADE, str(models)))


def is_made(folder: str) -> bool:
    """Whether a setting names a model that the run makes itself."""
    return folder.startswith(MADE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """From files to a better policy."""

    name: str
    data: Data
    tokenizer_rows: str
    """SQL condition: pictures that the image tokenizer is trained on. Captions are not looked at."""
    warm_up_rows: str
    """SQL condition: pictures with captions that the policy is warmed up on."""
    reward_rows: str
    """SQL condition: what the reward model is trained on."""
    evaluation_rows: str
    """SQL condition: held out from all training."""
    clip: ClipField | None = None
    """What is read out of the middle of each video, when the rows are videos. Its size is the tokenizer's."""
    num_evaluation_prompts: int = 200
    """How many of them are used, the first in order of their key."""
    stages: tuple[Stage, ...]
    tokenizer: TokenizerTraining = field(default_factory=TokenizerTraining)
    sft: SupervisedTraining = field(default_factory=SupervisedTraining)
    reward: RewardTraining | None = field(default_factory=RewardTraining)
    """None has no reward model; `scoring` then makes its reward of something else."""
    models: Models | None = None
    """Makes models to start from. In a setting for a folder, "{models}" is the run's own for models."""
    scoring: Scoring = field(default_factory=ModelAlone)
    """Makes the reward that the stages are trained on, out of the reward model and whatever else."""
    lora_rank: int = 0
    """Rank of LoRA adapters, which alone are then trained by the stages; 0 trains all weights."""
    settings: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ConfigError(f"lora_rank is {self.lora_rank}, wanted 1 or more, or 0 for no adapters")
