"""Picture and question in, answer out: GRPO on an exact rule.

    unirl ingest questions.jsonl data/questions --map caption=answer
    unirl train vlm_text_grpo --store data/questions
    unirl train vlm_text_grpo --tiny

The table has the columns image (or image_path), question and answer. The policy is a Janus, which sees
pictures through its vision encoder; a `TokenLM`, which reads them as codes, works as well (`--set
sft.model=... --set tokenizer.model=...`). Other vision-language models, such as Qwen2.5-VL, are rewards here
and cannot be policies. There is no chat template: a prompt is the picture and the words of the question.

Needs, for Janus-Pro-7B with LoRA, two GPUs of 80 GB. Expected, by arithmetic: one to two minutes a step,
about six hours for 200 steps. It was not run at this size. Tests run `--tiny` on a CPU: random weights of the
same classes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from recipes.gpu_forms import gpu_settings, tiny_form
from recipes.own_data import HELD_OUT, PICTURED, TRAINED, CaptionJudge, OwnData
from recipes.tiny_models import QUESTIONS, TinyJanus
from recipes.worlds.shapes import all_captions, all_scenes, draw_scene
from recipes.worlds.world_files import make_world
from unirl.cli import main
from unirl.rewards import Ensemble, ExactMatch, Length
from unirl.trainer.recipe import Recipe, SupervisedTraining, TokenizerTraining
from unirl.trainer.stages import Stage
from unirl.types import Judge, Reward

__all__ = ["AnswerRule", "TinyQuestions", "vlm_text_grpo"]

MODEL = "models/janus-pro-7b"
ROWS = f"{PICTURED} AND question <> '' AND {TRAINED}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRule:
    """1 for the right answer, word for word, and a little for one of a fitting length."""

    length_weight: float = 0.1
    max_words: int = 8
    """Longest answer that is not charged for its length."""

    def reward(self, model: Path) -> Reward:
        """Return the rules; no model is read."""
        length = Length(1, self.max_words)
        return Ensemble({"exact": (ExactMatch(), 1.0), "length": (length, self.length_weight)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyQuestions:
    """Pictures of one shape each, with a question about it."""

    num_rows: int = 24

    def sources(self, directory: Path, *, seed: int) -> Sequence[Path]:
        """Write a folder of pictures with a table, unless it is there."""
        folder = directory / "questions"
        make_world(
            folder, lambda out: self._write(out, seed), parameters={"rows": self.num_rows, "seed": seed}
        )
        return [folder]

    def captions(self) -> Sequence[str]:
        """Captions and questions."""
        return (*all_captions(), *QUESTIONS)

    def judge(self, *, seed: int) -> Judge:
        """Return the rule that answers must be word for word."""
        return CaptionJudge()

    def _write(self, folder: Path, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        scenes = [all_scenes()[i] for i in rng.permutation(len(all_scenes()))[: self.num_rows]]
        with (folder / "metadata.jsonl").open("w", encoding="utf-8") as table:
            for number, scene in enumerate(scenes):
                name, which = f"{number:03d}.png", number % len(QUESTIONS)
                Image.fromarray(draw_scene(scene, rng)).save(folder / name)
                answer = (scene[0].colour, scene[0].shape)[which]
                split = "eval" if number % 3 == 0 else "rl"
                row = {"file_name": name, "question": QUESTIONS[which], "caption": answer, "split": split}
                table.write(json.dumps(row) + "\n")


def vlm_text_grpo(*, seed: int = 0, tiny: bool = False) -> Recipe:
    """Return the complete run; `tiny` is the same one on random weights and 24 made questions."""
    recipe = Recipe(
        name="vlm_text_grpo",
        data=OwnData(),
        tokenizer_rows=ROWS,
        warm_up_rows=ROWS,
        reward_rows=ROWS,
        evaluation_rows=f"{PICTURED} AND question <> '' AND {HELD_OUT}",
        num_evaluation_prompts=512,
        stages=(
            Stage(
                name="text",
                direction="text",
                prompts=ROWS,
                steps=200,
                prompts_per_step=64,
                group_size=16,
                max_words=32,
                algorithm="grpo",
                temperature=1.0,
                learning_rate=1e-5,
                warmup_steps=20,
                updates_per_step=2,
                clip_low=0.2,
                clip_high=0.28,
                kl_coef=0.001,
                kl_target=None,
                max_grad_norm=1.0,
                importance="token",
                overlong_buffer=8,
            ),
        ),
        tokenizer=TokenizerTraining(model=MODEL),
        sft=SupervisedTraining(model=MODEL),
        reward=None,
        scoring=AnswerRule(),
        lora_rank=32,
        settings=gpu_settings(seed=seed),
    )
    if not tiny:
        return recipe
    return tiny_form(
        recipe,
        models=TinyJanus(),
        stage={"group_size": 4, "max_words": 3},
        settings={"evaluate_every": 0},
        data=TinyQuestions(),
        num_evaluation_prompts=8,
    )


if __name__ == "__main__":
    main(["train", "vlm_text_grpo", *sys.argv[1:]])
