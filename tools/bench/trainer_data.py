"""The model and the rows that every trainer of the trainer benchmark learns from."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from tools.bench.rollout_policies import endless_writer
from tools.bench.trainer_libraries.rows import GROUP, NUM_ROWS, PROMPT_LENGTH

__all__ = ["make_data"]

ADVANTAGE = 1.0


def make_data(folder: Path, *, response_length: int, longest: int) -> None:
    """Write a tiny Llama of 2.9M random parameters with its tokenizer, and two sets of rows.

    Args:
        folder: Gets `model/`, `even.npz` and `tails.npz`; emptied first.
        response_length: Tokens of every response of `even`.
        longest: Of `tails`, whose lengths are spread evenly on a log scale from 16 to this.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    policy = endless_writer(longest)
    policy.save(folder / "model")
    rng = np.random.default_rng(0)
    tails = np.exp(rng.uniform(np.log(16), np.log(longest), NUM_ROWS)).round().astype(np.int64)
    tails[:2] = 16, longest
    for name, lengths in (("even", np.full(NUM_ROWS, response_length)), ("tails", tails)):
        # The first ids are specials; from 16 on come words and image codes.
        ids = rng.integers(16, policy.vocabulary.size, (NUM_ROWS, PROMPT_LENGTH + lengths.max()))
        advantages = np.where(np.arange(NUM_ROWS) % GROUP % 2, ADVANTAGE, -ADVANTAGE)
        np.savez(
            folder / f"{name}.npz",
            ids=ids.astype(np.int64),
            lengths=lengths.astype(np.int64),
            advantages=advantages.astype(np.float32),
        )
