"""What vLLM loads in each of its processes, through the entry point `vllm.general_plugins`."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.rollout.vllm_requests import SHARED_MEMORY
from unirl.torchvision_ops import declare_before_torchvision

__all__ = ["register", "register_class"]

_done: list[str] = []


def register() -> None:
    """Prepare a process of vLLM: its inspection of models runs in children that import nothing of ours."""
    declare_before_torchvision()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if SHARED_MEMORY not in _done:
        WeightTransferEngineFactory.register_engine(
            SHARED_MEMORY, "unirl.rollout.vllm_transfer", "SharedMemoryTransferEngine"
        )
        _done.append(SHARED_MEMORY)
    if current_platform.is_cpu():
        # It compiles one comparison in its sampler with a C++ compiler, half a minute for nothing here.
        type(current_platform).simple_compile_backend = "eager"
        import unirl.rollout.vllm_plain  # noqa: F401


def register_class(model: Path) -> None:
    """Let vLLM know the class of a model, so that it starts no child process to look at it."""
    from vllm.model_executor.models import ModelRegistry

    for name in json.loads((model / "config.json").read_text())["architectures"]:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
