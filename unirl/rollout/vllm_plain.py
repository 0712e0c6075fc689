"""Linear layers that keep their weights as they are, for vLLM on a CPU.

vLLM's CPU build packs each weight matrix into a private copy when a model is loaded. New weights then reach
the copy only through a second load, and a head that shares its matrix with the embedding keeps the old copy.
Here the matrix that is loaded is the one that is computed with, as it is on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

__all__ = ["PLAIN", "PlainConfig"]

PLAIN = "unirl_plain"
"""Name under which vLLM knows it as a "quantization"."""


class PlainLinear(UnquantizedLinearMethod):
    """A matrix product with the weights as they were loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave them alone."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply."""
        weight: Tensor = layer.weight  # type: ignore[assignment]
        return torch.nn.functional.linear(x, weight, bias)


class PlainEmbedding(UnquantizedEmbeddingMethod):
    """The same for embeddings and heads."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave them alone."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply."""
        weight: Tensor = layer.weight  # type: ignore[assignment]
        return torch.nn.functional.linear(x, weight, bias)


@register_quantization_config(PLAIN)
class PlainConfig(QuantizationConfig):
    """Chooses the methods above."""

    def get_name(self) -> str:
        """Name of the choice."""
        return PLAIN

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """All that vLLM computes in."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file says anything about it."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlainConfig:
        """Make one; there is nothing to set."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a layer."""
        if isinstance(layer, LinearBase):
            return PlainLinear()
        return PlainEmbedding() if isinstance(layer, VocabParallelEmbedding) else None
