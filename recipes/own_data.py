"""Your own data: pictures with captions, and prompts, out of a store that `unirl ingest` made.

    unirl ingest photos/ prompts.txt data/store
    unirl train own_data --store data/store --run runs/mine

Everything is trained from scratch at toy size, unless you name models of your own (`tokenizer.model`,
`sft.model`, `reward.model`). One row in ten is held out of all training, chosen by the hash of its key. Text
stage: picture in, words out. Image stage: words in, picture out; prompts without a picture are drawn too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from storage import FeatureStore
from unirl.cli import main
from unirl.errors import ConfigError
from unirl.model_folder import QWEN_VL, require_model
from unirl.rewards import load_reward
from unirl.trainer.recipe import Recipe, RewardTraining, SupervisedTraining, TokenizerTraining
from unirl.trainer.stages import RunSettings, Stage
from unirl.types import Judge, Reward, Sample

__all__ = ["CaptionJudge", "OwnData", "own_data"]

CAPTIONED = "caption <> ''"
PICTURED = f"{CAPTIONED} AND bytes IS NOT NULL"
TRAINED = "md5(key) >= '1a'"
"""Nine rows in ten: the hash of a key begins with a hexadecimal number below 1a in one of ten."""
HELD_OUT = "md5(key) < '1a'"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData:
    """A store, and a judge."""

    store: str = ""
    """Folder of the store. The run works on a clone of it, whose files are links; nothing is added here."""
    judge_model: str = ""
    """Folder of a reward model that says what is right: one that is not trained on, nor trained like the
    reward. Without one, texts are right that are the caption, and drawings are not judged."""
    judge_bar: float = 0.5
    """Score from which the judge accepts."""

    def __post_init__(self) -> None:
        if not 0 <= self.judge_bar <= 1:
            raise ConfigError(f"judge_bar is {self.judge_bar}, wanted 0 to 1, as scores are")

    def store_path(self) -> Path:
        """Return the store's folder."""
        if not self.store:
            raise ConfigError(
                "own_data: which data? --store STORE names it; `unirl ingest FILES STORE` makes a store"
            )
        if self.judge_model:
            require_model(Path(self.judge_model), QWEN_VL)
        return Path(self.store)

    def sources(self, directory: Path, *, seed: int) -> Sequence[Path]:
        """Nothing is ingested: the store is there."""
        return []

    def captions(self) -> Sequence[str]:
        """Return every caption and prompt of the store, so that the vocabulary holds every word."""
        store = FeatureStore.open(self.store_path())
        if "caption" not in store.columns:
            raise ConfigError(f"{store.url}: has no captions; ingest them with --map caption=THEIR_COLUMN")
        captions: list[str] = store.select(CAPTIONED).column("caption").to_pylist()
        return captions

    def judge(self, *, seed: int) -> Judge:
        """Return the judge."""
        model = load_reward(self.judge_model) if self.judge_model else None
        return CaptionJudge(model=model, bar=self.judge_bar)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionJudge:
    """Says what is right by a model or, without one, by the caption alone."""

    model: Reward | None = None
    bar: float = 0.5

    def judge(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return float64 (B,), NaN for drawings that no model judges."""
        if self.model is not None:
            total = self.model.score(samples).total
            return np.where(np.isnan(total), np.nan, (total >= self.bar).astype(np.float64))
        is_right = [float(sample.caption.split() == sample.target.split()) for sample in samples]
        is_text = [sample.direction == "text" for sample in samples]
        return np.where(is_text, is_right, np.nan)


def own_data(*, seed: int = 0) -> Recipe:
    """Return the complete run; `--set` changes any of it, conditions included."""
    return Recipe(
        name="own_data",
        data=OwnData(),
        tokenizer_rows=f"bytes IS NOT NULL AND {TRAINED}",
        warm_up_rows=f"{PICTURED} AND {TRAINED}",
        reward_rows=f"{PICTURED} AND {TRAINED}",
        evaluation_rows=f"{PICTURED} AND {HELD_OUT}",
        num_evaluation_prompts=200,
        stages=(
            Stage(
                name="text",
                direction="text",
                prompts=f"{PICTURED} AND {TRAINED}",
                steps=60,
                max_words=16,
                lam=1.0,
                replay_prompts=8,
            ),
            Stage(
                name="image",
                direction="image",
                prompts=f"{CAPTIONED} AND {TRAINED}",
                steps=60,
                max_words=16,
                lam=1.0,
                replay_prompts=8,
            ),
        ),
        tokenizer=TokenizerTraining(),
        sft=SupervisedTraining(),
        reward=RewardTraining(),
        settings=RunSettings(seed=seed, evaluate_every=20),
    )


if __name__ == "__main__":
    main(["train", "own_data", *sys.argv[1:]])
