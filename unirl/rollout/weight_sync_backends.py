"""Weights through a transfer of vLLM's own, by its name: NCCL between GPUs.

vLLM moves the bytes; what is proven afterwards is the same as for every other transfer. Written for GPUs and
not run on one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from unirl.errors import ConfigError, RolloutError
from unirl.policies.policy import Policy
from unirl.rollout.vllm_requests import TokenEngine
from unirl.rollout.weight_sync import SyncReport
from unirl.rollout.weight_sync_checksums import checksum

__all__ = ["BACKENDS", "Backend"]


class Backend:
    """One transfer of vLLM between this trainer's policy and one engine, kept open between updates.

    Args:
        engine: Started with `weight_transfer` of the same name.
        policy: Its weights are sent each time.
        rank: Of this process; rank 0 speaks to the engine.
    """

    def __init__(self, engine: TokenEngine, policy: Policy, *, rank: int = 0) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        name = engine.info.transfer
        if name not in BACKENDS:
            raise ConfigError(f"the engine's weight transfer is {name!r}; known are {', '.join(BACKENDS)}")
        self._engine, self._weights, self._client = (
            engine,
            _weights(policy, engine.info.dtype),
            _Client(engine),
        )
        self._rank, self._is_known = rank, False
        self._transfer = WeightTransferTrainerFactory.trainer_init(
            BACKENDS[name](rank), client=self._client, source=_source(self._weights)
        )

    def send(self, version: int) -> SyncReport:
        """Send everything and compare the checksums.

        Raises:
            RolloutError: If the engine holds other bytes, with the tensor's name.
        """
        started = time.perf_counter()
        self._client.step = version
        if not self._is_known and self._rank == 0:
            shapes = {name: tuple(tensor.shape) for name, tensor in self._weights()}
            self._engine.learn(shapes, step=version)
            self._is_known = True
        self._transfer.send_weights()
        held = self._engine.checksums(step=version) if self._rank == 0 else {}
        num_tensors = num_bytes = 0
        for name, tensor in self._weights():
            sent = checksum(tensor, self._engine.info.checksum)
            if self._rank == 0 and held.get(name) != sent:
                raise RolloutError(
                    f"weight sync, version {version}: {self._engine.info.endpoint} holds {held.get(name)} "
                    f"for {name}, the trainer has {sent}; the engine would sample from another policy"
                )
            num_tensors, num_bytes = num_tensors + 1, num_bytes + tensor.nbytes
        if self._rank == 0:
            self._engine.finish_update(version)
        return SyncReport(
            version=version,
            num_tensors=num_tensors,
            num_bytes=num_bytes,
            transfer_s=time.perf_counter() - started,
        )


class _Client:
    """vLLM's `VLLMWeightSyncClient` over our engine."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine, self.step = engine, 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.backend("init_weight_transfer_engine", {"init_info": init_info}, step=self.step)

    def start_weight_update(self) -> None:
        self._engine.backend("start_weight_update", {}, step=self.step)

    def update_weights(self, update_info: Any) -> None:
        self._engine.backend("update_weights", {"update_info": update_info}, step=self.step)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.backend("finish_weight_update", {}, step=self.step)


def _weights(policy: Policy, dtype: str) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    """Make passes over the policy's weights, each shared tensor once, whole and in the engine's dtype."""

    first: dict[int, str] = {}
    shared = {
        name
        for name, parameter in policy.lm.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in policy.weights():
            gather = getattr(tensor, "full_tensor", None)
            if name not in shared:
                whole = tensor if gather is None else gather()
                yield name, whole.detach().to(getattr(torch, dtype)).contiguous()

    return weights


def _source(weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return weights()

    return Source()


def _nccl(rank: int) -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    address = socket.gethostbyname(socket.gethostname())
    return NCCLTrainerInitInfo(rank=rank, master_address=address, master_port=port, world_size=2)


BACKENDS: dict[str, Callable[[int], Any]] = {"nccl": _nccl}
"""Name of vLLM's transfer -> what its trainer side is started with."""
