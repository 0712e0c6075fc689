"""The fast recipe, for continuous integration: made scenes of coloured shapes, judged by an exact parser.

python -m recipes.shapes --run runs/shapes
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.worlds.shapes import all_captions, write_shapes
from recipes.worlds.shapes_judge import SceneJudge
from unirl.cli import main
from unirl.config import require_positive
from unirl.trainer.recipe import Recipe, RewardTraining, SupervisedTraining, TokenizerTraining
from unirl.trainer.stages import RunSettings, Stage
from unirl.types import Judge

__all__ = ["ShapesData", "shapes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapesData:
    """Scenes of one shape as PNG and JPEG folders and a tar."""

    num_sft: int = 1000
    num_rl: int = 400
    num_eval: int = 120

    def __post_init__(self) -> None:
        require_positive(self)

    def sources(self, directory: Path, *, seed: int) -> Sequence[Path]:
        """Write the files, unless they are there, and return the two folders and the tar."""
        files = write_shapes(
            directory, seed=seed, num_sft=self.num_sft, num_rl=self.num_rl, num_eval=self.num_eval
        )
        return [files.sft, files.rl, files.eval]

    def captions(self) -> Sequence[str]:
        """Captions of all scenes of one shape."""
        return all_captions()

    def judge(self, *, seed: int) -> Judge:
        """Return the parser; it does not depend on the seed."""
        return SceneJudge()


def shapes(*, seed: int = 0) -> Recipe:
    """Return the complete run."""
    return Recipe(
        name="shapes",
        data=ShapesData(),
        tokenizer_rows="split IN ('sft', 'rl')",
        warm_up_rows="split = 'sft'",
        reward_rows="split IN ('sft', 'rl')",
        evaluation_rows="split = 'eval' AND held_out",
        num_evaluation_prompts=60,
        stages=(
            Stage(name="text", direction="text", prompts="split = 'rl'", steps=10, max_words=8),
            Stage(name="image", direction="image", prompts="split = 'rl'", steps=10, max_words=8),
        ),
        tokenizer=TokenizerTraining(steps=150),
        sft=SupervisedTraining(steps=120),
        reward=RewardTraining(steps=150),
        settings=RunSettings(seed=seed),
    )


if __name__ == "__main__":
    main(["train", "shapes", *sys.argv[1:]])
