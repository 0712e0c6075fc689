"""The native engine: batched, continuous sampling in the process that trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from unirl.errors import ConfigError, RolloutError
from unirl.policies.policy import Policy
from unirl.policies.sharded_tensors import is_sharded
from unirl.policies.token_lm import TokenLM
from unirl.rollout.decoder import Decoder
from unirl.rollout.engine import PartialSample, RolloutRequest, assemble, begin, require_alike
from unirl.rollout.fused_decoder import FusedDecoder
from unirl.rollout.fused_weights import is_fusible
from unirl.rollout.generic_decoder import CopyDecoder, GenericDecoder
from unirl.rollout.native_probe import require_same_function
from unirl.rollout.native_rows import Added, Rows
from unirl.rollout.weight_sync import SyncReport
from unirl.rollout.weight_sync_probe import PROBE_GAPS
from unirl.types import Rollout

__all__ = ["NativeEngine"]


class NativeEngine:
    """Samples from a policy with the weights of its last `sync`.

    Where the decoder has tensors of its own, each sync is proven: every copy is compared with its source as
    it is made, and a fixed probe is drawn by the decoder and scored by the policy before anything else is
    drawn with these weights.

    A finished row's place is taken by the next sample; the samples of a group share one run of their prompt.
    Each token is drawn by inverting the distribution of `unirl.algorithms.sample_tokens` at a number of the
    sample's own stream, so that what is sampled depends on the seed and not on the company. Threads that
    share an engine take turns.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int | None = None,
        dtype: torch.dtype | None = None,
        compile: bool = False,
        decoder: Decoder | None = None,
        own_weights: bool = False,
        max_probe_gap: float = 0.0,
    ) -> None:
        """Take the policy's weights, as version 0.

        Args:
            policy: Sampled from.
            max_rows: Samples that are decoded at a time; None takes all of a request at once.
            dtype: Of the decoder's weights and cache, where it has its own; None takes the policy's.
            compile: Let `torch.compile` have the decoder's matrix part.
            decoder: None takes the fused one if it knows the policy's model, else the generic one.
            own_weights: Hold a copy of the weights in any case, as a policy whose weights will be sharded
                needs: ranks then decode without waiting for each other. The fused decoder always does.
            max_probe_gap: Nats that decoder and policy may differ by on the probe of a sync, if that is more
                than what their dtypes explain.

        Raises:
            ConfigError: If max_rows is below 1, or dtype or compile is asked of a model without a decoder of
                its own.
        """
        if max_rows is not None and not (isinstance(max_rows, int) and max_rows >= 1):
            raise ConfigError(
                f"max_rows is {max_rows!r}; the engine needs 1 or more, or None for all at once"
            )
        self.policy, self.max_rows = policy, max_rows
        self.decoder = decoder or _decoder_for(policy, dtype, compile, own_weights)
        self.policy_version = 0
        self.last_sync: SyncReport | None = None
        """What the last sync did, or None before the first."""
        self._max_probe_gap, self._is_proven = max_probe_gap, False
        self.active_rows: list[int] = []
        """Rows that were running at each decode step of the last run."""
        self._taken: tuple[object, ...] = ()
        self._lock = threading.RLock()

    def sync(self, policy: Policy, version: int) -> None:
        """Take over the policy's present weights; with sharded ones, all ranks call it together.

        Raises:
            RolloutError: If a tensor has no place, or one arrived otherwise than it is; it is named.
        """
        with self._lock:
            self._sync(policy, version)

    def _sync(self, policy: Policy, version: int) -> None:
        started = time.perf_counter()
        self.decoder.sync(policy)
        self.policy, self.policy_version = policy, version
        copies = self.decoder.copies
        self.last_sync = SyncReport(
            version=version,
            num_tensors=0 if copies is None else copies.num_tensors,
            num_bytes=0 if copies is None else copies.num_bytes,
            transfer_s=time.perf_counter() - started,
        )
        self._taken, self._is_proven = _marks(policy), copies is None
        if is_sharded(policy):
            self.prove()

    def prove(self) -> None:
        """Probe the weights of the last sync, unless that is done: before the first token is drawn with them.

        With sharded weights `sync` itself does it, since the policy's forward pass takes all ranks.

        Raises:
            RolloutError: If decoder and policy differ. A tensor that somebody changed since is named.
        """
        if self._is_proven or self.last_sync is None or self.decoder.copies is None:
            return
        started = time.perf_counter()
        names = (str(dtype).removeprefix("torch.") for dtype in (self.decoder.dtype, self.policy.dtype))
        allowed = max(self._max_probe_gap, *(PROBE_GAPS[name] for name in names))
        try:
            gap = require_same_function(self.policy, self.decoder, self.policy_version, max_gap=allowed)
        except RolloutError:
            if not is_sharded(self.policy):
                self.decoder.require_same(self.policy)
            raise
        self.last_sync = replace(self.last_sync, probe_s=time.perf_counter() - started, probe_gap=gap)
        self._is_proven = True

    def rollout(self, request: RolloutRequest) -> Rollout:
        """Serve a request in one go.

        A text response ends with `<eos>` or is cut after T tokens; a picture always has exactly T and is
        never cut. Weights that changed since the last sync are taken over first, under the same version.

        Raises:
            ConfigError: If the request cannot be served, see `RolloutRequest.check`, or T is not the length
                of a picture.
            RolloutError: As `sync` and `prove`.
        """
        started = time.perf_counter()
        with self._lock:
            samples, policy, active_rows = self.run(begin(request)), self.policy, self.active_rows
        return assemble(
            samples,
            [policy.prompt_ids(prompt) for prompt in request.prompts],
            group_size=request.group_size,
            pad=policy.vocabulary.pad,
            device=policy.device,
            active_rows=active_rows,
            decode_s=time.perf_counter() - started,
        )

    def run(self, samples: Sequence[PartialSample], *, max_steps: int | None = None) -> list[PartialSample]:
        """Go on with samples until they are done, or for some decode steps.

        Args:
            samples: All of one direction and under the same settings. They may have come from another engine.
            max_steps: Decode steps after which the engine hands over what it has; None for no limit.

        Returns:
            The samples in their order, with what was added. A stopped one can go on here or anywhere else,
            and ends with the same tokens as if it had not been stopped.
        """
        with self._lock:
            return self._run(samples, max_steps)

    def _run(self, samples: Sequence[PartialSample], max_steps: int | None) -> list[PartialSample]:
        require_alike(samples, self.policy)
        if self._taken != _marks(self.policy):
            self.sync(self.policy, self.policy_version)
        self.prove()
        left = [i for i, sample in enumerate(samples) if not sample.is_done]
        self.active_rows = []
        done = list(samples)
        for i, added in zip(left, self._draw([samples[i] for i in left], max_steps), strict=True):
            done[i] = samples[i].extended(
                added.ids, added.logprobs, version=self.policy_version, is_ended=added.is_ended
            )
        return done

    @torch.inference_mode()
    def _draw(self, samples: Sequence[PartialSample], max_steps: int | None) -> list[Added]:
        """Go on with samples that are not done; return what is added to each."""
        if not samples:
            return []
        rows = Rows(self.policy, self.decoder, samples, self.max_rows or len(samples))
        while rows.is_running and (max_steps is None or len(self.active_rows) < max_steps):
            self.active_rows.append(rows.num_active)
            rows.advance()
        return rows.results()

    def close(self) -> None:
        """Nothing to give back: the cache goes with the engine."""


def _decoder_for(policy: Policy, dtype: torch.dtype | None, compile: bool, own_weights: bool) -> Decoder:
    if isinstance(policy, TokenLM) and is_fusible(policy.decoder_config):
        return FusedDecoder(policy, dtype=dtype or policy.dtype, compile=compile)
    if dtype not in (None, policy.dtype) or compile:
        raise ConfigError(
            f"{policy.decoder_config.model_type} decodes through its own forward pass, in {policy.dtype} and "
            "uncompiled; convert or compile the policy itself"
        )
    return CopyDecoder(policy) if own_weights else GenericDecoder(policy)


def _marks(policy: Policy) -> tuple[object, ...]:
    """Change when a weight is written to in place or replaced."""
    return tuple((id(parameter), parameter._version) for parameter in policy.lm.parameters())
