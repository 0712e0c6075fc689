"""What is added to vLLM's workers: new weights, checked as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.rollout.vllm_requests import Checksums

__all__ = ["WeightReceiver"]


class WeightReceiver:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called by their names.

    They use the transfer engine that the worker was started with, `SharedMemoryTransferEngine`.
    """

    device: torch.device
    weight_transfer_engine: Any

    def unirl_begin_update(self) -> None:
        """Start an update; one that was never finished is given up."""
        if getattr(self, "_weight_update_active", False):
            self.finish_weight_update()  # type: ignore[attr-defined]
        self.start_weight_update()  # type: ignore[attr-defined]

    @torch.no_grad()
    def unirl_put(self, weights: Sequence[tuple[str, Tensor]]) -> dict[str, Checksums]:
        """Load some tensors that are in this process already."""
        sums: dict[str, Checksums] = self.weight_transfer_engine.weights.put(
            [(name, tensor.to(self.device)) for name, tensor in weights]
        )
        return sums

    def unirl_held(self) -> dict[str, Checksums]:
        """Return the checksums of the bucket that came last through vLLM's own `update_weights`."""
        sums: dict[str, Checksums] = self.weight_transfer_engine.held
        return sums

    def unirl_require_complete(self) -> None:
        """Refuse an update that left something out."""
        self.weight_transfer_engine.weights.finish()
