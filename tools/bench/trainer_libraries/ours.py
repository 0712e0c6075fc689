"""This project: `update_policy` on given rows, and whole steps of the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from tools.bench.storage_libraries.task import Result, Task
from tools.bench.trainer_libraries.rows import (
    BETAS,
    CLIP,
    GROUP,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    PROMPT_LENGTH,
    Rows,
    read_rows,
)
from tools.bench.trainer_libraries.whole_step import Clock, make_trainer
from unirl.policies.policy import Policy
from unirl.policies.token_lm import TokenLM
from unirl.trainer.stages import Stage
from unirl.trainer.update import update_policy
from unirl.types import Experience, Prompt, Rollout, SamplingSettings, Scores, TokenOrigin

STAGE = Stage(
    name="text",
    direction="text",
    prompts="true",
    steps=1,
    algorithm="grpo",
    group_size=GROUP,
    updates_per_step=1,
    clip_low=CLIP,
    clip_high=CLIP,
    max_grad_norm=MAX_GRAD_NORM,
    kl_coef=0.0,
    kl_in="reward",
)


class Update(Task):
    """One optimizer step of GRPO on given rows."""

    def __init__(
        self, data: Path, folder: Path, *, rows: str, budget: int = 0, precision: str = "no"
    ) -> None:
        self.rows, self.budget, self.precision = read_rows(data / f"{rows}.npz"), budget, precision
        super().__init__(data, folder)

    def open(self) -> None:
        policy = TokenLM.load(self.data / "model")
        allow_all(policy)
        self.accelerator = Accelerator(cpu=True, mixed_precision=self.precision)
        optimizer = torch.optim.AdamW(
            policy.trained_parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0
        )
        self.model, self.optimizer = self.accelerator.prepare(policy, optimizer)
        with torch.no_grad():
            self.experience = experience_of(policy, self.rows)

    def run(self, round_number: int) -> Result:
        started = time.perf_counter()
        metrics = update_policy(
            self.accelerator,
            self.model,
            self.optimizer,
            [self.experience],
            STAGE,
            kl_coef=0.0,
            micro_batch_tokens=self.budget,
        )
        elapsed = time.perf_counter() - started
        norm = float(metrics["policy/grad_norm_max"])
        return {"seconds": elapsed, "tokens": self.rows.num_tokens, "grad_norm": norm}


class WholeStep(Task):
    """Rollout, score and update through the trainer; says too how long its parts took."""

    def open(self) -> None:
        length = int(read_rows(self.data / "even.npz").response_mask.shape[1])
        self.clock = Clock()
        self.trainer, self.stage = make_trainer(self.data, self.folder, self.clock, response_length=length)

    def run(self, round_number: int) -> Result:
        self.clock.seconds.clear()
        started = time.perf_counter()
        self.trainer._timed_step(self.stage)
        elapsed = time.perf_counter() - started
        return {"seconds": elapsed, **self.clock.seconds}


def allow_all(policy: Policy) -> None:
    """Score tokens among all ids, as the others do, so that all learn from the same loss."""
    policy.masks_text[:, : policy.vocabulary.size] = True


def experience_of(policy: Policy, rows: Rows) -> Experience:
    """The rows as a rollout of the policy as it is now."""
    num_rows, length = rows.response_mask.shape
    output = policy(rows.ids, rows.mask, prompt_length=PROMPT_LENGTH, direction="text")
    old_logprobs = torch.where(rows.response_mask, output.logprobs, 0.0)
    prompts = [Prompt(key=str(p), direction="text", caption="") for p in range(num_rows // GROUP)]
    return Experience(
        rollout=Rollout(
            prompts=prompts,
            group_size=GROUP,
            input_ids=rows.ids,
            attention_mask=rows.mask,
            prompt_length=PROMPT_LENGTH,
            response_mask=rows.response_mask,
            old_logprobs=old_logprobs,
            truncated=torch.zeros(num_rows, dtype=torch.bool),
            origin=TokenOrigin.constant(
                (num_rows, length), direction="text", sampling=SamplingSettings(), policy_version=0
            ),
        ),
        scores=Scores(total=np.zeros(num_rows)),
        old_logprobs=old_logprobs,
        ref_logprobs=old_logprobs,
        old_values=torch.zeros(num_rows, length),
        loss_mask=rows.response_mask,
        advantages=torch.where(rows.response_mask, rows.advantages[:, None], 0.0),
        returns=torch.zeros(num_rows, length),
    )


TASKS: dict[str, Callable[[Path, Path], Task]] = {
    "even": partial(Update, rows="even", budget=4224),
    "even-bf16": partial(Update, rows="even", budget=4224, precision="bf16"),
    "tails": partial(Update, rows="tails", budget=8192),
    "step": WholeStep,
}
