"""What vLLM loads in each of its processes, through the entry point `vllm.general_plugins`."""

from __future__ import annotations

from unirl.torchvision_ops import declare_before_torchvision

__all__ = ["register"]


def register() -> None:
    """Prepare a process of vLLM: its inspection of models runs in children that import nothing of ours."""
    declare_before_torchvision()
