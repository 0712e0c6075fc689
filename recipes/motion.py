"""The video path from file to reward: made clips of moving shapes, and a small model that says what moves.

    python -m recipes.motion --run runs/motion

Clips are written as MP4 files and ingested as videos. Two frames of each are read out of the store, turned
into codes and shown to the policy, which answers "a red square moves left". A rule that measures the clip's
pixels is the reward. Some motions are held out of all training; what counts is how well the policy does on
them, as an exact judge sees it that is never a reward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from datapipe import ClipField
from recipes.worlds.motion import CLIP_FPS, DURATION_S, MAX_HELD_OUT, motion_captions, write_motion
from recipes.worlds.motion_judge import MotionJudge, MotionReward
from unirl.cli import main
from unirl.errors import ConfigError
from unirl.policies.image_tokenizer import ImageTokenizerConfig
from unirl.trainer.recipe import Recipe, SupervisedTraining, TokenizerTraining
from unirl.trainer.stages import RunSettings, Stage
from unirl.types import Judge, Reward

__all__ = ["MotionData", "MotionRule", "motion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MotionData:
    """Three folders of MP4 files with a table of captions each."""

    num_sft: int = 600
    num_rl: int = 1200
    num_eval: int = 400
    num_held_out: int = 6
    num_sft_motions: int = 24
    """The warm-up sees few motions and RL many: that is what there is to learn from a reward."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_held_out <= MAX_HELD_OUT:
            raise ConfigError(f"num_held_out is {self.num_held_out}, wanted 0 to {MAX_HELD_OUT}")
        most = len(motion_captions()) - self.num_held_out
        if not 1 <= self.num_sft_motions <= most:
            raise ConfigError(
                f"num_sft_motions is {self.num_sft_motions}, wanted 1 to the {most} that are not held out"
            )

    def sources(self, directory: Path, *, seed: int) -> Sequence[Path]:
        """Write the files, unless they are there, and return the folders."""
        files = write_motion(
            directory,
            seed=seed,
            num_sft=self.num_sft,
            num_rl=self.num_rl,
            num_eval=self.num_eval,
            num_held_out=self.num_held_out,
            num_sft_motions=self.num_sft_motions,
        )
        return [files.sft, files.rl, files.eval]

    def captions(self) -> Sequence[str]:
        """Captions of all motions."""
        return motion_captions()

    def judge(self, *, seed: int) -> Judge:
        """Return the exact judge; it does not depend on the seed."""
        return MotionJudge()


@dataclass(frozen=True, slots=True, kw_only=True)
class MotionRule:
    """The rule that measures the clip."""

    def reward(self, model: Path) -> Reward:
        """Return it; no model is read."""
        return MotionReward()


def motion(*, seed: int = 0) -> Recipe:
    """Return the complete run."""
    return Recipe(
        name="motion",
        data=MotionData(),
        clip=ClipField(length_s=DURATION_S, fps=CLIP_FPS),
        tokenizer_rows="split IN ('sft', 'rl')",
        warm_up_rows="split = 'sft'",
        reward_rows="split IN ('sft', 'rl')",
        evaluation_rows="split = 'eval' AND held_out",
        num_evaluation_prompts=200,
        stages=(
            Stage(
                name="text",
                direction="text",
                prompts="split = 'rl'",
                steps=80,
                prompts_per_step=64,
                group_size=4,
                max_words=5,
                algorithm="grpo",
                learning_rate=3e-4,
                learning_rate_decay="cosine",
                updates_per_step=1,
            ),
        ),
        tokenizer=TokenizerTraining(
            config=ImageTokenizerConfig(fold=8, num_codes=512, code_dim=16), steps=150
        ),
        sft=SupervisedTraining(steps=30, batch_size=32, text_fraction=1.0),
        reward=None,
        scoring=MotionRule(),
        settings=RunSettings(seed=seed, micro_prompts=32, evaluate_every=20),
    )


if __name__ == "__main__":
    main(["train", "motion", *sys.argv[1:]])
