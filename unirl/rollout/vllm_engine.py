"""Rollouts of a `TokenLM` by vLLM, in this process or behind a URL."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from unirl.errors import ConfigError
from unirl.policies.policy import Policy
from unirl.policies.token_lm import TokenLM
from unirl.rollout.engine import RolloutEngine, RolloutRequest, assemble, begin, sample_seed
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
        if not is_sender:
            self._engine.info = replace(self._engine.info, policy_version=version)
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
        if self._policy is None:
            raise ConfigError("this engine has no policy yet; call sync first")
        policy, samples = self._policy, begin(request)
        asked = token_request(policy, request)
        started = time.perf_counter()
        answer = self._engine.generate(asked, step=self.policy_version)
        decode_s = time.perf_counter() - started
        answer.check(asked)
        finished = [
            replace(
                sample,
                ids=ids,
                logprobs=logprobs,
                versions=(answer.policy_version,) * len(ids),
                is_ended=asked.end_id is not None and ids[-1] == asked.end_id,
            )
            for sample, ids, logprobs in zip(samples, answer.ids, answer.logprobs, strict=True)
        ]
        lengths = torch.tensor([len(ids) for ids in answer.ids])
        return assemble(
            finished,
            asked.prompts,
            group_size=request.group_size,
            pad=policy.vocabulary.pad,
            device=policy.device,
            active_rows=[int((lengths > t).sum()) for t in range(int(lengths.max()))],
            decode_s=decode_s,
        )

    def close(self) -> None:
        """Free the engine, or take leave of the server."""
        self._engine.close()


def token_request(policy: TokenLM, request: RolloutRequest) -> TokenRequest:
    """Turn prompts into token ids and their seeds into one integer a sample."""
    grammar = policy.vocabulary.grammar(request.direction)
    places = len(grammar.places)
    if request.direction == "image" and request.max_new_tokens != policy.max_response_length("image", 0):
        raise ConfigError(
            f"max_new_tokens is {request.max_new_tokens}, a picture has "
            f"{policy.max_response_length('image', 0)} tokens"
        )
    guided = request.sampling.guidance != 1.0
    return TokenRequest(
        prompts=tuple(tuple(policy.prompt_ids(prompt)) for prompt in request.prompts),
        unconditional=tuple(tuple(policy.unconditional_ids(p)) for p in request.prompts) if guided else (),
        seeds=tuple(sample_seed(seed, g) for seed in request.seeds for g in range(request.group_size)),
        max_new_tokens=request.max_new_tokens,
        temperature=request.sampling.temperature,
        guidance=request.sampling.guidance,
        allowed=AllowedIds.from_masks(grammar.masks, grammar.places[: min(places, request.max_new_tokens)]),
        end_id=policy.vocabulary.eos if request.direction == "text" else None,
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
