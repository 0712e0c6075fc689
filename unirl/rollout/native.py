"""The native engine: batched, continuous sampling in the process that trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from unirl.errors import ConfigError
from unirl.policies.policy import Policy
from unirl.policies.token_lm import TokenLM
from unirl.rollout.decoder import Decoder
from unirl.rollout.engine import PartialSample, RolloutRequest, assemble, begin
from unirl.rollout.fused_decoder import FusedDecoder
from unirl.rollout.fused_weights import is_fusible
from unirl.rollout.generic_decoder import CopyDecoder, GenericDecoder
from unirl.rollout.native_rows import Rows
from unirl.types import Rollout

__all__ = ["NativeEngine"]


class NativeEngine:
    """Samples from a policy with the weights of its last `sync`.

    A finished row's place is taken by the next sample; the samples of a group share one run of their prompt.
    Each token is drawn by inverting the distribution of `unirl.algorithms.sample_tokens` at a number of the
    sample's own stream, so that what is sampled depends on the seed and not on the company.
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

        Raises:
            ConfigError: If max_rows is below 1, or dtype or compile is asked of a model without a decoder of
                its own.
        """
        if max_rows is not None and max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows}; the engine needs 1 or more, or None for all at once")
        self.policy, self.max_rows = policy, max_rows
        self.decoder = decoder or _decoder_for(policy, dtype, compile, own_weights)
        self.policy_version = 0
        self.active_rows: list[int] = []
        """Rows that were running at each decode step of the last run."""
        self._taken: tuple[object, ...] = ()

    def sync(self, policy: Policy, version: int) -> None:
        """Take over the policy's present weights."""
        self.policy, self.policy_version = policy, version
        self.decoder.sync(policy)
        self._taken = _marks(policy)

    def rollout(self, request: RolloutRequest) -> Rollout:
        """Serve a request in one go.

        A text response ends with `<eos>` or is cut after T tokens; a picture always has exactly T and is
        never cut. Weights that changed since the last sync are taken over first, under the same version.

        Raises:
            ConfigError: If the request cannot be served, see `RolloutRequest.check`, or T is not the length
                of a picture.
        """
        started = time.perf_counter()
        samples = self.run(begin(request))
        return assemble(
            samples,
            [self.policy.prompt_ids(prompt) for prompt in request.prompts],
            group_size=request.group_size,
            pad=self.policy.vocabulary.pad,
            device=self.policy.device,
            active_rows=self.active_rows,
            decode_s=time.perf_counter() - started,
        )

    @torch.inference_mode()
    def run(self, samples: Sequence[PartialSample], *, max_steps: int | None = None) -> list[PartialSample]:
        """Go on with samples until they are done, or for some decode steps.

        Args:
            samples: All of one direction and under the same settings. They may have come from another engine.
            max_steps: Decode steps after which the engine hands over what it has; None for no limit.

        Returns:
            The samples in their order, with what was added. A stopped one can go on here or anywhere else,
            and ends with the same tokens as if it had not been stopped.
        """
        self._check(samples)
        if self._taken != _marks(self.policy):
            self.sync(self.policy, self.policy_version)
        left = [i for i, sample in enumerate(samples) if not sample.is_done]
        done = list(samples)
        self.active_rows = []
        if left:
            rows = Rows(self.policy, self.decoder, [samples[i] for i in left], self.max_rows or len(left))
            while rows.is_running and (max_steps is None or len(self.active_rows) < max_steps):
                self.active_rows.append(rows.num_active)
                rows.advance()
            for i, added in zip(left, rows.results(), strict=True):
                versions = (self.policy_version,) * len(added.ids)
                done[i] = replace(
                    samples[i],
                    ids=samples[i].ids + added.ids,
                    logprobs=samples[i].logprobs + added.logprobs,
                    versions=samples[i].versions + versions,
                    is_ended=added.is_ended,
                )
        return done

    def close(self) -> None:
        """Nothing to give back: the cache goes with the engine."""

    def _check(self, samples: Sequence[PartialSample]) -> None:
        codes = self.policy.vocabulary.grid.response_length
        for sample in samples:
            place = f"{sample.prompt.key}, sample {sample.sample}"
            first = samples[0]
            if (sample.prompt.direction, sample.sampling) != (first.prompt.direction, first.sampling):
                raise ConfigError(
                    f"{place}: {sample.prompt.direction} under {sample.sampling}, the first sample is "
                    f"{first.prompt.direction} under {first.sampling}; run them one after the other"
                )
            if sample.prompt.direction == "image" and sample.max_new_tokens != codes:
                raise ConfigError(
                    f"{place}: {sample.max_new_tokens} tokens are asked for, a picture has {codes}"
                )


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
