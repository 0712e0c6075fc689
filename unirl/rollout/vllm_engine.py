"""Rollouts of a `TokenLM` by vLLM, in this process or behind a URL."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from unirl.errors import ConfigError
from unirl.policies.policy import Policy
from unirl.policies.token_lm import TokenLM
from unirl.rollout.engine import (
    PartialSample,
    RolloutEngine,
    RolloutRequest,
    assemble,
    begin,
    require_alike,
    sample_seed,
)
from unirl.rollout.native import NativeEngine
from unirl.rollout.server_client import RemoteVllm
from unirl.rollout.vllm_local import LocalVllm, VllmSettings
from unirl.rollout.vllm_requests import SHARED_MEMORY, AllowedIds, TokenEngine, TokenRequest
from unirl.rollout.weight_sync import SyncReport, send_weights
from unirl.rollout.weight_sync_backends import Backend
from unirl.rollout.weight_sync_probe import PROBE_GAPS, require_agreement
from unirl.types import Rollout

__all__ = ["URL_VARIABLE", "VllmEngine", "open_engine", "start_local", "token_request", "write_model_config"]

URL_VARIABLE = "UNIRL_ROLLOUT_URL"
"""Of the server that `vllm` means; without it vLLM runs in the trainer's process."""


class VllmEngine:
    """A `RolloutEngine` over a token engine.

    Samples have the distribution of the native engine and of the trainer: the same grammar, guidance and
    temperature, log-probs after all of them. They are not the same samples, since vLLM draws its own random
    numbers from each sample's seed.

    Args:
        engine: vLLM in this process (`LocalVllm`) or a server (`RemoteVllm`).
        max_probe_gap: Nats that engine and trainer may differ by on the probe of a sync, if that is more than
            what the engine's dtype explains.
    """

    def __init__(self, engine: TokenEngine, *, max_probe_gap: float = 0.0) -> None:
        self._engine = engine
        self._max_gap = max(PROBE_GAPS[engine.info.dtype], max_probe_gap)
        self._policy: TokenLM | None = None
        self._backend: Backend | None = None
        self.policy_version = engine.info.policy_version
        """Of the engine's weights; -1 before the first sync."""
        self.last_sync: SyncReport | None = None
        """What the last sync did."""

    def sync(self, policy: Policy, version: int) -> None:
        """Send the policy's weights and prove that the engine has them. All ranks call it together.

        Raises:
            RolloutError: If the proof fails; the tensor is named.
            ConfigError: If the policy is none that vLLM can run.
        """
        if not isinstance(policy, TokenLM):
            raise ConfigError(f"vLLM runs causal LMs (TokenLM); roll out {type(policy).__name__} natively")
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        is_sender = rank == 0
        if self._engine.info.transfer == SHARED_MEMORY:
            report = send_weights(policy, self._engine, version, is_sender=is_sender)
        else:
            self._backend = self._backend or Backend(self._engine, policy, rank=rank)
            report = self._backend.send(version)
        self._tell_ranks(version)
        started = time.perf_counter()
        gap = require_agreement(
            policy,
            self._engine,
            version,
            max_length=policy.decoder_config.max_position_embeddings,
            max_gap=self._max_gap,
            is_sender=is_sender,
        )
        self._policy, self.policy_version = policy, version
        self.last_sync = replace(report, probe_s=time.perf_counter() - started, probe_gap=gap)

    def rollout(self, request: RolloutRequest) -> Rollout:
        """Sample G responses for each of P prompts."""
        samples = begin(request)
        started = time.perf_counter()
        finished = self._draw(samples, group_size=request.group_size)
        decode_s = time.perf_counter() - started
        policy = self._synced_policy()
        lengths = torch.tensor([len(sample.ids) for sample in finished])
        return assemble(
            finished,
            [policy.prompt_ids(prompt) for prompt in request.prompts],
            group_size=request.group_size,
            pad=policy.vocabulary.pad,
            device=policy.device,
            active_rows=[int((lengths > t).sum()) for t in range(int(lengths.max()))],
            decode_s=decode_s,
        )

    def run(self, samples: Sequence[PartialSample], *, max_steps: int | None = None) -> list[PartialSample]:
        """Go on with samples until they are done, or for some tokens each.

        Args:
            samples: All of one direction and under the same settings. They may have come from another engine,
                of either kind.
            max_steps: Tokens that each sample gets at most; None for no limit.

        Returns:
            The samples in their order, with what was added. A stopped one can go on here or elsewhere. What
            is added then is not what would have been without the stop, and has the same distribution.
        """
        if max_steps is not None and max_steps < 1:
            return list(samples)
        left = [sample for sample in samples if not sample.is_done]
        drawn = iter(self._draw(left, max_steps=max_steps)) if left else iter(())
        return [sample if sample.is_done else next(drawn) for sample in samples]

    def _draw(
        self, samples: Sequence[PartialSample], *, group_size: int = 1, max_steps: int | None = None
    ) -> list[PartialSample]:
        asked = token_request(self._synced_policy(), samples, group_size=group_size, max_steps=max_steps)
        answer = self._engine.generate(asked, step=self.policy_version)
        answer.check(asked)
        return [
            sample.extended(
                ids,
                logprobs,
                version=answer.policy_version,
                is_ended=asked.end_id is not None and ids[-1] == asked.end_id,
            )
            for sample, ids, logprobs in zip(samples, answer.ids, answer.logprobs, strict=True)
        ]

    def _tell_ranks(self, version: int) -> None:
        """Let all ranks know which update they sample from from now on."""
        if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return
        update = [self._engine.info.update]
        torch.distributed.broadcast_object_list(update)
        self._engine.info = replace(self._engine.info, policy_version=version, update=update[0])

    def _synced_policy(self) -> TokenLM:
        if self._policy is None:
            raise ConfigError("this engine has no policy yet; call sync first")
        return self._policy

    def close(self) -> None:
        """Free the engine, or take leave of the server."""
        self._engine.close()


def token_request(
    policy: TokenLM, samples: Sequence[PartialSample], *, group_size: int = 1, max_steps: int | None = None
) -> TokenRequest:
    """Turn samples that are not done into token ids, and their seeds into one integer each.

    A sample that goes on gets a seed of its place, since the random numbers of the first tokens are used up.

    Args:
        policy: Gives tokens and grammar.
        samples: B, of one direction and under the same settings.
        group_size: G; each G samples in a row have one prompt.
        max_steps: Tokens that each gets at most; None for no limit.

    Raises:
        ConfigError: If they cannot run together, or a picture is asked for with another number of tokens.
    """
    require_alike(samples, policy)
    first, length = samples[0], max(sample.max_new_tokens for sample in samples)
    direction, sampling = first.prompt.direction, first.sampling
    grammar = policy.vocabulary.grammar(direction)
    prompts = [sample.prompt for sample in samples[::group_size]]
    is_guided = sampling.guidance != 1.0
    left = [sample.max_new_tokens - len(sample.ids) for sample in samples]
    return TokenRequest(
        prompts=tuple(tuple(policy.prompt_ids(prompt)) for prompt in prompts),
        unconditional=tuple(tuple(policy.unconditional_ids(p)) for p in prompts) if is_guided else (),
        seeds=tuple(
            sample_seed((*sample.seed, sample.sample), len(sample.ids))
            if sample.ids
            else sample_seed(sample.seed, sample.sample)
            for sample in samples
        ),
        max_new_tokens=length,
        temperature=sampling.temperature,
        guidance=sampling.guidance,
        allowed=AllowedIds.from_masks(grammar.masks, grammar.places[:length]),
        end_id=policy.vocabulary.eos if direction == "text" else None,
        written=tuple(sample.ids for sample in samples) if any(sample.ids for sample in samples) else (),
        limits=tuple(left if max_steps is None else [min(n, max_steps) for n in left]),
    )


def write_model_config(policy: TokenLM, directory: Path) -> None:
    """Write the `config.json` that an engine is started from; no weights."""
    policy.lm.config.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"architectures": [type(policy.lm).__name__]}
    path.write_text(json.dumps(config, indent=2) + "\n")


def start_local(
    policy: TokenLM, settings: VllmSettings | None = None, *, max_probe_gap: float = 0.0
) -> VllmEngine:
    """Start vLLM in this process for a policy. It has random weights until the first `sync`."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_config(policy, Path(folder))
        return VllmEngine(LocalVllm(Path(folder), settings), max_probe_gap=max_probe_gap)


def open_engine(
    kind: str, policy: Policy, *, own_weights: bool = False, max_probe_gap: float = 0.0
) -> RolloutEngine:
    """Return the engine that a run asks for.

    Args:
        kind: "native", or "vllm": the server that the environment variable UNIRL_ROLLOUT_URL names, or one in
            this process.
        policy: Sampled from.
        own_weights: Its weights will be sharded, see `NativeEngine`; vLLM always has its own.
        max_probe_gap: Nats that the precision of the trainer's own forward pass explains, see
            `Distribution.logprob_gap`.

    Raises:
        ConfigError: If there is no such engine, or it cannot run the policy.
    """
    if kind == "native":
        return NativeEngine(policy, own_weights=own_weights, max_probe_gap=max_probe_gap)
    if kind != "vllm":
        raise ConfigError(f"there is no rollout engine {kind!r}; known are native and vllm")
    if not isinstance(policy, TokenLM):
        raise ConfigError(f"vLLM runs causal LMs (TokenLM); roll out {type(policy).__name__} natively")
    url = os.environ.get(URL_VARIABLE)
    if url:
        return VllmEngine(RemoteVllm(url), max_probe_gap=max_probe_gap)
    return start_local(policy, max_probe_gap=max_probe_gap)
