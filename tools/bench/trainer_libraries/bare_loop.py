"""No library: forward, log-probs, the clipped loss, backward and step, all rows at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tools.bench.storage_libraries import torchvision_ops  # noqa: F401  before transformers
from tools.bench.storage_libraries.task import Result, Task
from tools.bench.trainer_libraries.rows import (
    BETAS,
    CLIP,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    PROMPT_LENGTH,
    read_rows,
)

from transformers import AutoModelForCausalLM  # isort: skip


class Update(Task):
    """One optimizer step of GRPO on given rows."""

    def __init__(self, data: Path, folder: Path, *, rows: str) -> None:
        self.rows = read_rows(data / f"{rows}.npz")
        self.old_logprobs: torch.Tensor | None = None
        super().__init__(data, folder)

    def open(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.data / "model", dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0
        )

    def run(self, round_number: int) -> Result:
        started = time.perf_counter()
        rows, mask = self.rows, self.rows.response_mask
        logits = self.model(input_ids=rows.ids, attention_mask=rows.mask.long()).logits
        logprobs = torch.log_softmax(logits[:, PROMPT_LENGTH - 1 : -1], dim=-1)
        logprobs = logprobs.gather(2, rows.ids[:, PROMPT_LENGTH:, None]).squeeze(2)
        if self.old_logprobs is None:
            self.old_logprobs = logprobs.detach()
        ratio = (logprobs - self.old_logprobs).exp()
        advantages = rows.advantages[:, None]
        clipped = ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
        loss = -torch.minimum(advantages * ratio, advantages * clipped)
        loss = ((loss * mask).sum(dim=1) / mask.sum(dim=1)).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        elapsed = time.perf_counter() - started
        return {"seconds": elapsed, "tokens": rows.num_tokens, "grad_norm": float(norm)}


TASKS: dict[str, Callable[[Path, Path], Task]] = {
    "even": partial(Update, rows="even"),
    "tails": partial(Update, rows="tails"),
}
