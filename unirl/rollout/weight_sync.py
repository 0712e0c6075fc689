"""From the trainer's policy to an engine: in buckets, and proven each time.

What is proven: every tensor that the engine computes with has the trainer's bytes, nothing is left over on
either side, and the engine's own samples have the log-probs that the trainer gives them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.errors import ConfigError, RolloutError
from unirl.policies.policy import Policy
from unirl.rollout.vllm_requests import Checksums, TokenEngine, WeightBucket

__all__ = ["SyncReport", "buckets", "send_weights"]

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one sync did."""

    version: int
    num_tensors: int
    num_bytes: int
    transfer_s: float
    """Sending, loading and summing, without the probe."""
    probe_s: float = 0.0
    probe_gap: float = 0.0
    """Largest difference, nats, between engine and trainer on the probe's tokens."""


def buckets(
    weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[WeightBucket]:
    """Cut a stream of weights into buckets of about `bucket_bytes`.

    Sharded tensors are gathered one bucket at a time; every rank must consume the stream.
    """
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        gather = getattr(tensor, "full_tensor", None)
        whole = (tensor if gather is None else gather()).detach()
        if whole.is_floating_point() and whole.dtype != dtype:
            whole = whole.to(dtype)
        held.append((name, whole.contiguous()))
        size += whole.numel() * whole.element_size()
        if size >= bucket_bytes:
            yield WeightBucket(weights=held)
            held, size = [], 0
    if held:
        yield WeightBucket(weights=held)


def send_weights(policy: Policy, engine: TokenEngine, version: int, *, is_sender: bool = True) -> SyncReport:
    """Give an engine the policy's present weights and compare the checksums of both sides.

    Args:
        policy: Its `weights()` are sent, LoRA merged.
        engine: Where to.
        version: Of these weights.
        is_sender: False on ranks that only help to gather shards.

    Raises:
        RolloutError: If a tensor is not the same on both sides, is left over, or an engine does not answer.
    """
    started = time.perf_counter()
    dtype = getattr(torch, engine.info.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"{engine.info.endpoint}: the engine's dtype {engine.info.dtype!r} is none of torch's"
        )
    num_tensors = num_bytes = 0
    if is_sender:
        engine.begin_update(step=version)
    for bucket in buckets(policy.weights(), dtype=dtype):
        if is_sender:
            _require_equal(bucket, engine.put(bucket, step=version), engine, version)
        num_tensors += len(bucket.weights)
        num_bytes += bucket.num_bytes
    if is_sender:
        engine.finish_update(version)
    return SyncReport(
        version=version,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        transfer_s=time.perf_counter() - started,
    )


def _require_equal(
    bucket: WeightBucket, found: Mapping[str, Checksums], engine: TokenEngine, version: int
) -> None:
    for name, _ in bucket.weights:
        sums = found.get(name)
        if sums is None or sums.sent != sums.held:
            what = "nothing" if sums is None else f"bytes with checksum {sums.held}"
            sent = "" if sums is None else f", the trainer has {sums.sent}"
            raise RolloutError(
                f"weight sync, version {version}: {engine.info.endpoint} holds {what} for {name}{sent}; the "
                "engine would sample from another policy. A tied pair whose tensors differ, and a full or "
                "reused memory segment, are the usual causes"
            )
