"""What is added to vLLM's workers: new weights, checked as they arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.rollout.vllm_requests import Checksums
from unirl.rollout.weight_sync_map import EngineWeights

__all__ = ["WeightReceiver"]


class WeightReceiver:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called by their names."""

    device: torch.device
    model_runner: Any
    weight_transfer_engine: Any
    start_weight_update: Any
    finish_weight_update: Any
    unirl_known_weights: EngineWeights | None = None

    def unirl_begin_update(self) -> None:
        """Start an update; one that was never finished is given up."""
        self._unirl_end_session()
        self.start_weight_update()

    @torch.no_grad()
    def unirl_put(self, weights: Sequence[tuple[str, Tensor]]) -> dict[str, Checksums]:
        """Load some tensors that are in this process already."""
        return self._unirl_weights().put([(name, tensor.to(self.device)) for name, tensor in weights])

    def unirl_held(self) -> dict[str, Checksums]:
        """Return the checksums of the bucket that came last through vLLM's own `update_weights`."""
        sums: dict[str, Checksums] = self.weight_transfer_engine.held
        return sums

    @torch.no_grad()
    def unirl_learn(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Find out where tensors of these names and shapes end up."""
        dtype = self.model_runner.model_config.dtype
        self._unirl_weights().learn(shapes, dtype=dtype, device=self.device)

    def unirl_checksums(self) -> dict[str, str]:
        """Of all tensors as the model holds them."""
        return self._unirl_weights().checksums()

    def unirl_end_update(self) -> None:
        """Refuse an update that left something out, and end it."""
        self._unirl_weights().finish()
        self._unirl_end_session()

    def _unirl_end_session(self) -> None:
        if getattr(self, "_weight_update_active", False):
            self.finish_weight_update()

    def _unirl_weights(self) -> EngineWeights:
        """Those of our own transfer, or of this worker if it was started with one of vLLM's."""
        ours = getattr(self.weight_transfer_engine, "weights", None)
        if isinstance(ours, EngineWeights):
            return ours
        if self.unirl_known_weights is None:
            self.unirl_known_weights = EngineWeights(self.model_runner.model)
        return self.unirl_known_weights
