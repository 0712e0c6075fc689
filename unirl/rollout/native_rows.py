"""Rows of the native engine: which sample has which place in the cache, and what each has written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unirl.algorithms.sampling import sample_tokens
from unirl.errors import ConfigError
from unirl.policies.padding import left_pad
from unirl.policies.policy import Policy
from unirl.rollout.decoder import Decoder, Prefix
from unirl.rollout.engine import PartialSample, sample_stream
from unirl.types import Prompt

__all__ = ["Added", "Rows"]

REFILL_SHARE = 8
"""Free places wait until there are an eighth of all: running one prompt costs as much as a step of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What one run added to a sample."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_ended: bool


_Start = tuple[tuple[int, ...], str]
"""Tokens, and `Policy.picture_key` of the pictures that placeholders among them stand for: rows with the same
start share one run of it."""


@dataclass(slots=True, kw_only=True)
class _Share:
    """A prompt that was run, for the samples that still wait for it."""

    prefix: Prefix
    index: int
    length: int


class Rows:
    """Places in a decoder's cache, and the queue of samples that wait for one.

    With guidance each place holds two rows of the decoder: the conditional and, right behind it, the
    unconditional one. Both get the same tokens.
    """

    def __init__(
        self, policy: Policy, decoder: Decoder, samples: Sequence[PartialSample], max_rows: int
    ) -> None:
        first = samples[0]
        self.policy, self.decoder, self.samples = policy, decoder, samples
        self.direction, self.sampling = first.prompt.direction, first.sampling
        self.branches = 1 if first.sampling.guidance == 1.0 else 2
        self.length = max(sample.max_new_tokens for sample in samples)
        device = policy.device
        self._kinds: list[int] = policy.vocabulary.grammar(self.direction).places.tolist()
        """Which mask holds at each place of a response; empty if one holds at all."""
        self._candidates: dict[int, tuple[slice, Tensor]] = {}
        """By the kind of the place: from the first allowed id to the last, and which of these are allowed,
        int64 (K,), ascending, counted from the first."""
        self._prompts = [self._branch_ids(sample) for sample in samples]
        self._require_positions()
        streams = [sample_stream(s.seed, s.sample, s.max_new_tokens) for s in samples]
        uniforms = np.stack([np.pad(stream, (0, self.length - len(stream))) for stream in streams])
        self._uniforms = torch.from_numpy(uniforms).to(device)
        self._ids = torch.zeros(len(samples), self.length, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(len(samples), self.length, device=device)
        self._queue = list(range(len(samples)))[::-1]
        self._shown = [policy.picture_key(sample.prompt) for sample in samples]
        self._shares: dict[_Start, _Share] = {}
        self._written = [len(sample.ids) for sample in samples]
        self._is_ended = [False] * len(samples)
        num_places = min(max_rows, len(samples))
        longest = max(len(ids) for branches in self._prompts for ids in branches)
        capacity = longest + self.length
        if num_places < len(samples):
            capacity += capacity // 2
        decoder.open(num_places * self.branches, clock=longest, capacity=capacity)
        self._place_of: list[int | None] = [None] * num_places
        """The sample in each place."""
        self._positions = torch.zeros(num_places, self.branches, dtype=torch.int64, device=device)
        self._hidden = torch.empty(0, device=device)
        self._refill()

    @property
    def num_active(self) -> int:
        """Places with a sample that is not done."""
        return sum(sample is not None for sample in self._place_of)

    @property
    def is_running(self) -> bool:
        """Something is left to draw."""
        return self.num_active > 0

    def advance(self) -> None:
        """Draw the next token of every active sample, then bring the cache up to it."""
        places = [place for place, sample in enumerate(self._place_of) if sample is not None]
        ids = self._draw(places)
        if self.is_running:
            self._step(ids)
        if self._queue:
            self._refill()
        elif self.is_running:
            self._compact()

    def results(self) -> list[Added]:
        """What was added to each sample so far."""
        ids, logprobs = self._ids.tolist(), self._logprobs.tolist()
        return [
            Added(
                ids=tuple(ids[i][len(sample.ids) : self._written[i]]),
                logprobs=tuple(logprobs[i][len(sample.ids) : self._written[i]]),
                is_ended=self._is_ended[i],
            )
            for i, sample in enumerate(self.samples)
        ]

    def _draw(self, places: list[int]) -> Tensor:
        """Draw a token for each of these places and free the finished; int64 (all places,)."""
        samples = [self._sample_in(place) for place in places]
        written = [self._written[sample] for sample in samples]
        where = torch.tensor(places, device=self._ids.device)
        who, when = (torch.tensor(values, device=self._ids.device) for values in (samples, written))
        hidden = self._hidden.view(len(self._place_of), self.branches, -1)
        if len(places) < len(self._place_of):
            hidden = hidden[where]
        drawn, logprobs = self._sample(hidden, self._uniforms[who, when], written)
        self._ids[who, when] = drawn
        self._logprobs[who, when] = logprobs.float()
        ended = (drawn == self.policy.vocabulary.eos).tolist() if self.direction == "text" else None
        for i, (place, sample) in enumerate(zip(places, samples, strict=True)):
            self._written[sample] += 1
            self._is_ended[sample] = ended is not None and ended[i]
            if self._is_ended[sample] or self._written[sample] == self.samples[sample].max_new_tokens:
                self._place_of[place] = None
        if len(places) == len(self._place_of):
            return drawn
        return torch.full_like(self._positions[:, 0], self.policy.vocabulary.pad).index_copy_(0, where, drawn)

    def _sample(self, hidden: Tensor, uniforms: Tensor, written: list[int]) -> tuple[Tensor, Tensor]:
        """Draw behind hidden states (rows, branches, D) of rows that have written so much.

        Rows at one kind of place are drawn among its ids alone: the distribution is the same, the work less.
        """
        kinds = [self._kinds[place] for place in written] if self._kinds else [0]
        places = dict(zip(kinds, written, strict=False))
        span, candidates, allowed = slice(None), None, None
        if len(places) == 1:
            span, candidates = self._candidates_at(kinds[0], written[0])
        else:
            order = list(places)
            masks = torch.stack([self.policy.allowed_at(self.direction, place) for place in places.values()])
            allowed = masks[torch.tensor([order.index(kind) for kind in kinds], device=masks.device)]
        logits = self.decoder.logits(hidden, self.direction, span)
        if candidates is not None and len(candidates) < logits.shape[-1]:
            logits = logits[..., candidates]
        drawn, logprobs = sample_tokens(
            logits[:, 0],
            uniforms=uniforms,
            allowed=allowed,
            temperature=self.sampling.temperature,
            uncond=logits[:, 1] if self.branches == 2 else None,
            guidance=self.sampling.guidance,
        )
        return drawn if candidates is None else candidates[drawn] + span.start, logprobs

    def _candidates_at(self, kind: int, place: int) -> tuple[slice, Tensor]:
        """Ids that may stand at a place of this kind."""
        if kind not in self._candidates:
            ids = self.policy.allowed_at(self.direction, place).nonzero()[:, 0]
            first, last = int(ids[0]), int(ids[-1])
            self._candidates[kind] = slice(first, last + 1), ids - first
        return self._candidates[kind]

    def _step(self, ids: Tensor) -> None:
        lengths: list[int] = []
        for sample in self._place_of:
            if sample is None:
                lengths.extend([1] * self.branches)
            else:
                added = self._written[sample] - len(self.samples[sample].ids)
                lengths.extend(len(branch) + added for branch in self._prompts[sample])
        self._hidden = self.decoder.step(
            ids.repeat_interleave(self.branches), self._positions.flatten(), lengths
        )
        self._positions += 1

    def _refill(self) -> None:
        """Give free places to waiting samples, once there are enough of them."""
        free = [place for place, sample in enumerate(self._place_of) if sample is None]
        if len(free) * REFILL_SHARE < len(self._place_of) and len(free) < len(self._queue):
            return
        pairs = [(place, self._queue.pop()) for place in free[: len(self._queue)]]
        self._run_prompts([sample for _, sample in pairs])
        by_prefix: dict[int, tuple[Prefix, list[tuple[int, _Share]]]] = {}
        for place, sample in pairs:
            self._place_of[place] = sample
            for branch, start in enumerate(self._starts(sample)):
                share = self._shares[start]
                row = place * self.branches + branch
                by_prefix.setdefault(id(share.prefix), (share.prefix, []))[1].append((row, share))
                self._positions[place, branch] = share.length
        if self._hidden.numel() == 0:
            width = next(iter(self._shares.values())).prefix.hidden.shape[1]
            hidden = next(iter(self._shares.values())).prefix.hidden
            self._hidden = hidden.new_zeros(len(self._place_of) * self.branches, width)
        for prefix, rows in by_prefix.values():
            device = self._ids.device
            targets = torch.tensor([row for row, _ in rows], device=device)
            which = torch.tensor([share.index for _, share in rows], device=device)
            lengths = torch.tensor([share.length for _, share in rows], device=device)
            self.decoder.place(targets, prefix, which, lengths)
            self._hidden[targets] = prefix.hidden[which]
        waiting = {start for sample in self._queue for start in self._starts(sample)}
        self._shares = {start: share for start, share in self._shares.items() if start in waiting}

    def _run_prompts(self, samples: Sequence[int]) -> None:
        """Run each distinct prompt of these samples that was not run yet, all in one batch."""
        new: dict[_Start, Prompt | None] = {}
        for sample in samples:
            for branch, start in enumerate(self._starts(sample)):
                if start not in self._shares:
                    new.setdefault(start, self.samples[sample].prompt if branch == 0 else None)
        if not new:
            return
        ids, mask = left_pad([ids for ids, _ in new], self.policy.vocabulary.pad)
        pictures = self.policy.pictures([prompt for prompt in new.values() if prompt is not None])
        device = self._ids.device
        prefix = self.decoder.prefill(ids.to(device), mask.to(device), pictures)
        for index, start in enumerate(new):
            self._shares[start] = _Share(prefix=prefix, index=index, length=len(start[0]))

    def _starts(self, sample: int) -> tuple[_Start, ...]:
        """What each branch of a sample begins behind."""
        shown = (self._shown[sample], "")
        return tuple(zip(self._prompts[sample], shown[: self.branches], strict=True))

    def _compact(self) -> None:
        """Close the gaps once an eighth of the places is free."""
        free = [place for place, sample in enumerate(self._place_of) if sample is None]
        if len(free) * REFILL_SHARE < len(self._place_of):
            return
        kept = len(self._place_of) - len(free)
        late = [place for place in range(kept, len(self._place_of)) if self._place_of[place] is not None]
        early = [place for place in free if place < kept]
        device, width = self._ids.device, self.branches
        source = torch.tensor([p * width + b for p in late for b in range(width)], dtype=torch.int64)
        target = torch.tensor([p * width + b for p in early for b in range(width)], dtype=torch.int64)
        source, target = source.to(device), target.to(device)
        self.decoder.move(source, target, kept * width)
        self._hidden[target] = self._hidden[source]
        self._hidden = self._hidden[: kept * width]
        for old, new in zip(late, early, strict=True):
            self._positions[new] = self._positions[old]
            self._place_of[new] = self._place_of[old]
        self._positions, self._place_of = self._positions[:kept], self._place_of[:kept]

    def _require_positions(self) -> None:
        """Refuse a sample that would grow beyond the positions that the model knows."""
        known = getattr(self.policy.decoder_config, "max_position_embeddings", None)
        for sample, branches in zip(self.samples, self._prompts, strict=True):
            prompt, new = len(branches[0]) - len(sample.ids), sample.max_new_tokens
            if known is not None and prompt + new > known:
                raise ConfigError(
                    f"{sample.prompt.key}: a prompt of {prompt} tokens and {new} new ones, the model has "
                    f"{known} positions; ask for fewer tokens, or leave so long a prompt out"
                )

    def _sample_in(self, place: int) -> int:
        sample = self._place_of[place]
        if sample is None:
            raise AssertionError(f"place {place} is free")
        return sample

    def _branch_ids(self, sample: PartialSample) -> tuple[tuple[int, ...], ...]:
        """Prompt and tokens so far, of each branch."""
        branches = [self.policy.prompt_ids(sample.prompt)]
        if self.branches == 2:
            branches.append(self.policy.unconditional_ids(sample.prompt))
        return tuple((*ids, *sample.ids) for ids in branches)
