"""A weight transfer of vLLM over shared memory, for a trainer on the same machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from unirl.rollout.vllm_requests import Checksums
from unirl.rollout.weight_sync_map import EngineWeights
from unirl.rollout.weight_sync_memory import Entry, map_block, tensors_in

__all__ = ["SharedMemoryTransferEngine"]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket."""

    path: str
    """Of a `SharedBlock`."""
    num_bytes: int
    entries: list[dict[str, Any]]


class SharedMemoryTransferEngine(WeightTransferEngine):
    """Loads each bucket from memory that the trainer wrote, into the weights that the model computes with."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = EngineWeights(self.model)
        self.held: dict[str, Checksums] = {}
        """Checksums of the bucket that came last."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Start an update."""
        self.weights.begin()

    @torch.no_grad()
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Map the memory, copy out of it and sum both sides."""
        block = map_block(Path(update_info.path), update_info.num_bytes)
        entries = [Entry.from_json(values) for values in update_info.entries]
        self.held = self.weights.put(
            [(name, tensor.to(self.device)) for name, tensor in tensors_in(block, entries)]
        )

    def finish_weight_update(self) -> None:
        """Nothing to do: leftovers are asked for separately, so that vLLM's session always ends."""

    def shutdown(self) -> None:
        """Nothing to give back."""
