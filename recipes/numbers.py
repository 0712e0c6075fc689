"""The default demo: real handwriting, two digits to a number, read and written by one small model.

    python -m recipes.numbers --run runs/demo

Text stage: picture in, words out. Image stage: words in, picture out. Some numbers are held out of all
training; what counts is how well the policy does on them, as a classifier sees it that was fitted on digits
of its own and is never a reward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipes.worlds.handwriting import DigitPools, all_captions, write_numbers
from recipes.worlds.handwriting_judge import DigitJudge
from unirl.cli import main
from unirl.config import require_positive
from unirl.trainer.recipe import Recipe, RewardTraining
from unirl.trainer.stages import RunSettings, Stage
from unirl.types import Judge

__all__ = ["NumbersData", "numbers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumbersData:
    """Handwritten numbers as PNG and JPEG folders and a tar."""

    num_sft: int = 3000
    num_rl: int = 1500
    num_eval: int = 800
    num_held_out: int = 9
    """Numbers that are held out, spread over the tens digits."""
    pools: DigitPools = field(default_factory=lambda: DigitPools(judge=600, sft=150, rl=750))
    """The warm-up sees few hands and RL many: that is what there is to learn from a reward."""

    def __post_init__(self) -> None:
        require_positive(self)

    def sources(self, directory: Path, *, seed: int) -> Sequence[Path]:
        """Write the files, unless they are there, and return the two folders and the tar."""
        files = write_numbers(
            directory,
            seed=seed,
            num_sft=self.num_sft,
            num_rl=self.num_rl,
            num_eval=self.num_eval,
            num_held_out=self.num_held_out,
            pools=self.pools,
        )
        return [files.sft, files.rl, files.eval]

    def captions(self) -> Sequence[str]:
        """Captions of all numbers from 10 to 99."""
        return all_captions()

    def judge(self, *, seed: int) -> Judge:
        """Return the classifier that was fitted on the judge's own digits."""
        return DigitJudge(seed, pools=self.pools)


def numbers(*, seed: int = 0) -> Recipe:
    """Return the complete run."""
    return Recipe(
        name="numbers",
        data=NumbersData(),
        tokenizer_rows="split IN ('sft', 'rl')",
        warm_up_rows="split = 'sft'",
        reward_rows="split IN ('sft', 'rl')",
        evaluation_rows="split = 'eval' AND held_out",
        num_evaluation_prompts=400,
        stages=(
            Stage(
                name="text",
                direction="text",
                prompts="split = 'rl'",
                steps=90,
                prompts_per_step=32,
                group_size=4,
                max_words=5,
                learning_rate=3e-4,
                updates_per_step=1,
                lam=1.0,
                kl_coef=0.05,
                replay_prompts=16,
            ),
            Stage(
                name="image",
                direction="image",
                prompts="split = 'rl'",
                steps=80,
                learning_rate=3e-4,
                max_words=5,
                lam=1.0,
                replay_prompts=8,
            ),
        ),
        reward=RewardTraining(steps=320),
        settings=RunSettings(seed=seed, evaluate_every=30),
    )


if __name__ == "__main__":
    main(["train", "numbers", *sys.argv[1:]])
