"""TRL's GRPO trainer, in the peers' environment: updates on given rows, and whole steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from tools.bench.storage_libraries import torchvision_ops  # noqa: F401  before transformers
from tools.bench.storage_libraries.task import Result, Task
from tools.bench.trainer_libraries.pace import Pace
from tools.bench.trainer_libraries.rows import (
    BETAS,
    CLIP,
    GROUP,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NUM_ROWS,
    PROMPT_LENGTH,
    Rows,
    read_rows,
)

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # isort: skip
from trl import GRPOConfig, GRPOTrainer  # isort: skip

STEP_PROMPT_LENGTH = 19
"""Tokens of the prompts that our own steps have: a picture of 16 codes and three marks."""


class GivenRows(GRPOTrainer):
    """Learns from given rows in place of samples of its own; all else is the library's."""

    rows: Rows
    norm = 0.0
    """Of the last gradient."""
    old_logprobs: torch.Tensor | None = None

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        norm = super()._clip_grad_norm(model)
        self.norm = float(norm)
        return norm

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        rows, length = self.rows, self.rows.response_mask.shape[1]
        if self.old_logprobs is None:
            with torch.no_grad():
                scored = self._get_per_token_logps_and_entropies(
                    self.model, rows.ids, rows.mask.long(), length
                )
            self.old_logprobs = scored[0]
        return {
            "prompt_ids": rows.ids[:, :PROMPT_LENGTH],
            "prompt_mask": torch.ones(len(rows.ids), PROMPT_LENGTH, dtype=torch.long),
            "completion_ids": rows.ids[:, PROMPT_LENGTH:],
            "completion_mask": rows.response_mask.long(),
            "advantages": rows.advantages,
            "old_per_token_logps": self.old_logprobs,
            "num_items_in_batch": rows.response_mask.sum(),
        }


class Paced(TrainerCallback):
    """Waits between steps."""

    def __init__(self, between_steps: Callable[[], None]) -> None:
        self._between_steps = between_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._between_steps()


class Update(Task):
    """One optimizer step of GRPO on given rows."""

    def __init__(self, data: Path, folder: Path, *, rows: str) -> None:
        self.rows = read_rows(data / f"{rows}.npz")
        super().__init__(data, folder)

    def open(self) -> None:
        def train(between_steps: Callable[[], None]) -> None:
            self.trainer = make_trainer(GivenRows, self.data, self.folder, between_steps)
            self.trainer.rows = self.rows
            self.trainer.train()

        self.pace = Pace(train)

    def run(self, round_number: int) -> Result:
        elapsed = self.pace.step()
        return {"seconds": elapsed, "tokens": self.rows.num_tokens, "grad_norm": self.trainer.norm}


class WholeStep(Task):
    """Generation with transformers, scoring and update."""

    def open(self) -> None:
        self.pace = Pace(
            lambda between_steps: make_trainer(GRPOTrainer, self.data, self.folder, between_steps).train()
        )

    def run(self, round_number: int) -> Result:
        return {"seconds": self.pace.step()}


def make_trainer(
    kind: type[GRPOTrainer], data: Path, folder: Path, between_steps: Callable[[], None]
) -> GRPOTrainer:
    """The library's trainer in float32, with our loss, optimizer and batch."""
    length = int(read_rows(data / "even.npz").response_mask.shape[1])
    words = [f"word{i:03d}" for i in range(250)]
    prompts = [" ".join(words[i : i + STEP_PROMPT_LENGTH]) for i in range(NUM_ROWS)]
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    return kind(
        model=AutoModelForCausalLM.from_pretrained(data / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(data / "model"),
        reward_funcs=varied_words,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Paced(between_steps)],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=NUM_ROWS,
            gradient_accumulation_steps=1,
            num_generations=GROUP,
            max_completion_length=length,
            generation_kwargs={"min_new_tokens": length},
            beta=0.0,
            loss_type="grpo",
            epsilon=CLIP,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            max_steps=1_000_000,
            logging_steps=1_000_000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )


def varied_words(completions: list[str], **_: Any) -> list[float]:
    """The share of a text's words that are different ones."""
    texts = [completion.split() for completion in completions]
    return [len(set(text)) / max(len(text), 1) for text in texts]


TASKS: dict[str, Callable[[Path, Path], Task]] = {
    "even": partial(Update, rows="even"),
    "tails": partial(Update, rows="tails"),
    "step": WholeStep,
}
