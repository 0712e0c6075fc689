"""Prompts by step: conditions that change on schedule, and those prompts alone that can still teach."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from storage import FeatureStore, View
from unirl.errors import ConfigError
from unirl.trainer.prompts import PromptSource
from unirl.trainer.stages import Stage
from unirl.types import Prompt

__all__ = ["Curriculum", "outside_window"]

log = logging.getLogger("unirl.trainer.curriculum")

MakeSource = Callable[[View, int], PromptSource]
"""Opens an endless stream of a view's prompts, given a seed."""


def outside_window(success_rates: Mapping[str, float], stage: Stage) -> list[str]:
    """Sorted keys of prompts whose rate is outside the stage's window; unseen ones never are."""
    if stage.success_window is None:
        return []
    low, high = stage.success_window
    return sorted(key for key, rate in success_rates.items() if not low <= rate <= high)


class Curriculum:
    """An endless stream of this rank's prompts, out of what the stage may draw from at each step.

    Its state is the cursor, how often the stream was opened, and what is left out, so that a resumed run
    draws the same prompts. All ranks leave out the same.
    """

    def __init__(self, stage: Stage, view: View, make_source: MakeSource, *, seed: int) -> None:
        """Open the first stream.

        Args:
            stage: Its conditions, and how many prompts a step needs.
            view: Rows of the first condition.
            make_source: Opens a stream.
            seed: Of the run. Each stream has one of its own, so that no order comes twice.

        Raises:
            ConfigError: With every later condition that selects too few prompts.
        """
        self._stage, self._view, self._make, self._seed = stage, view, make_source, seed
        self._lesson, self._openings, self._left_out = 0, 0, list[str]()
        self._require_prompts()
        self._source = make_source(view, seed)
        self.kept_fraction = 1.0

    @property
    def store(self) -> FeatureStore:
        """Where the prompts are."""
        return self._view.store

    def next(self, stage_step: int) -> list[Prompt]:
        """This rank's prompts of a step of the stage, counted from 0."""
        lesson = sum(stage_step >= later.from_step for later in self._stage.curriculum)
        if lesson != self._lesson:
            self._lesson = lesson
            self._open()
        return self._source.next()

    def is_choice_due(self, stage_step: int) -> bool:
        """Whether success rates are looked at before this step."""
        stage = self._stage
        return bool(stage.success_window and stage_step and stage_step % stage.success_every == 0)

    def leave_out(self, keys: list[str]) -> None:
        """Draw no more of these prompts, and again of all others; the same keys change nothing."""
        if keys != self._left_out:
            self._left_out = keys
            self._open()

    def state_dict(self) -> dict[str, Any]:
        """JSON values; they hold at any number of ranks."""
        return {
            "lesson": self._lesson,
            "openings": self._openings,
            "left_out": self._left_out,
            "cursor": self._source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last prompts that were handed out when the state was taken."""
        self._lesson, self._left_out = state["lesson"], list(state["left_out"])
        if state["openings"]:
            self._openings = state["openings"] - 1
            self._open()
        self._source.load_state_dict(state["cursor"])

    def close(self) -> None:
        """Stop the threads that read ahead."""
        self._source.close()

    def _open(self) -> None:
        self._source.close()
        self._openings += 1
        seed = int(np.random.SeedSequence([self._seed, self._openings]).generate_state(1)[0])
        self._source = self._make(self._allowed(), seed)

    def _allowed(self) -> View:
        whole = self._condition(self._lesson)
        if not self._left_out:
            self.kept_fraction = 1.0
            return whole
        keys = {"key": self._left_out}
        rows = whole.store.select("key IN (SELECT key FROM left_out)", tables={"left_out": keys}).rows
        kept = whole[np.flatnonzero(~np.isin(whole.rows, rows))]
        if len(kept) < self._stage.prompts_per_step:
            log.warning(
                "stage %s: %d prompts are inside success_window %s, a step needs %d: all %d are drawn from",
                self._stage.name,
                len(kept),
                self._stage.success_window,
                self._stage.prompts_per_step,
                len(whole),
            )
            kept = whole
        self.kept_fraction = len(kept) / len(whole)
        return kept

    def _condition(self, lesson: int) -> View:
        if not lesson:
            return self._view
        return self._view.store.select(self._stage.curriculum[lesson - 1].prompts)

    def _require_prompts(self) -> None:
        found = {i: len(self._condition(i)) for i in range(1, len(self._stage.curriculum) + 1)}
        wrong = [
            f"stage {self._stage.name}: {self._stage.curriculum[i - 1].prompts!r} selects {number} prompts, "
            f"a step needs {self._stage.prompts_per_step}"
            for i, number in found.items()
            if number < self._stage.prompts_per_step
        ]
        if wrong:
            raise ConfigError("this run cannot start:\n  " + "\n  ".join(wrong))
