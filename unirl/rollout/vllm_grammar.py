"""Grammar and guidance inside vLLM: a logits processor in front of its temperature and sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from unirl.errors import RolloutError

__all__ = ["EXTRA", "GrammarProcessor"]

EXTRA = "unirl"
"""Key of `SamplingParams.extra_args` that holds masks and places of `AllowedIds`, the place of the first new
token, and the pair of a guided request: {"masks": ..., "places": ..., "start": int, "pair": int,
"conditional": bool, "guidance": float}."""


@dataclass(slots=True)
class _Row:
    """One request in the batch."""

    masks: tuple[int, ...]
    """Rows of the table of masks."""
    places: tuple[int, ...]
    start: int
    """Place of the first token that is drawn."""
    written: list[int]
    """Tokens drawn so far; vLLM's own list, which grows."""
    pair: int | None
    conditional: bool
    guidance: float


class GrammarProcessor(LogitsProcessor):
    """Masks the ids that a place does not allow, and mixes the two requests of a guided sample.

    The two branches of a guided sample are two requests with one seed. Both get the same mixed logits, so
    they draw the same token and stay in step; the trainer's own mix, `uncond + s (cond - uncond)`, is exact
    here too. A branch without its partner, or one place behind it, is an error and never a guess.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._device = device
        self._known: dict[tuple[tuple[int, int], ...], int] = {}
        self._forbidden = torch.zeros(1, self._vocabulary, dtype=torch.bool, device=device)
        """Row 0 forbids nothing."""

    def is_argmax_invariant(self) -> bool:
        """No: what is masked may be the largest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that come, go and move within the batch."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, written in batch_update.added:
            self._rows.pop(index, None)
            if EXTRA in (params.extra_args or {}):
                self._rows[index] = self._row(params, written)
        for first, second, direction in batch_update.moved:
            moved, other = self._rows.pop(first, None), self._rows.pop(second, None)
            if moved is not None:
                self._rows[second] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                self._rows[first] = other

    def apply(self, logits: Tensor) -> Tensor:
        """Mix and mask float32 (B, V) in place."""
        if not self._rows:
            return logits
        self._mix(logits)
        masks = [0] * len(logits)
        for index, row in self._rows.items():
            place = row.start + len(row.written)
            masks[index] = row.masks[row.places[place] if row.places else 0]
        table = self._forbidden[torch.tensor(masks, device=self._device)]
        return logits.masked_fill_(table[:, : logits.shape[1]], -math.inf)

    def _mix(self, logits: Tensor) -> None:
        sides: dict[int, dict[bool, int]] = {}
        for index, row in self._rows.items():
            if row.pair is not None:
                sides.setdefault(row.pair, {})[row.conditional] = index
        if not sides:
            return
        for pair, found in sides.items():
            places = {len(self._rows[index].written) for index in found.values()}
            if len(found) != 2 or len(places) != 1:
                raise RolloutError(
                    f"guided sample {pair}: its two branches are not in step ({len(found)} in the batch, at "
                    f"places {sorted(places)}), so the guided distribution cannot be exact; give the engine "
                    "more cache, or fewer samples at once"
                )
        conditional = torch.tensor([found[True] for found in sides.values()], device=self._device)
        unconditional = torch.tensor([found[False] for found in sides.values()], device=self._device)
        scale = torch.tensor([self._rows[f[True]].guidance for f in sides.values()], device=self._device)
        base = logits[unconditional]
        mixed = base + scale[:, None] * (logits[conditional] - base)
        logits[conditional] = mixed
        logits[unconditional] = mixed

    def _row(self, params: SamplingParams, written: list[int]) -> _Row:
        extra: dict[str, Any] = params.extra_args[EXTRA]
        return _Row(
            masks=tuple(self._mask(tuple((s[0], s[1]) for s in spans)) for spans in extra["masks"]),
            places=tuple(extra["places"]),
            start=extra["start"],
            written=written,
            pair=extra.get("pair"),
            conditional=extra.get("conditional", True),
            guidance=extra.get("guidance", 1.0),
        )

    def _mask(self, spans: tuple[tuple[int, int], ...]) -> int:
        """Row of the table for a set of ids; a new one is added."""
        if spans not in self._known:
            forbidden = torch.ones(1, self._vocabulary, dtype=torch.bool, device=self._device)
            for first, behind in spans:
                forbidden[0, first:behind] = False
            self._known[spans] = len(self._forbidden)
            self._forbidden = torch.cat([self._forbidden, forbidden])
        return self._known[spans]
