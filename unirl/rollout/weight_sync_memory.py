"""A bucket of weights as one block of bytes, in memory that two processes share or on its way over HTTP."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.errors import RolloutError
from unirl.rollout.vllm_requests import WeightBucket
from unirl.rollout.weight_sync_checksums import checksum, copy_checked

__all__ = ["Entry", "SharedBlock", "fill", "layout", "map_block", "pack", "tensors_in", "unpack"]

ALIGNMENT = 64
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
PREFIX = "unirl-weights-"
HEADER_BYTES = 8
YOUNG_S = 60.0
"""A file is not looked at before it is so old: it may be on its way to its lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one tensor stands in the block."""

    name: str
    dtype: str
    """Such as "float32"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes, a multiple of 64."""

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        size: int = getattr(torch, self.dtype).itemsize
        for length in self.shape:
            size *= length
        return size

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Entry:
        """Read what `asdict` made."""
        return cls(**{**values, "shape": tuple(values["shape"])})


def layout(bucket: WeightBucket) -> tuple[list[Entry], int]:
    """Lay a bucket's tensors out one behind the other; return their places and the bytes in total."""
    entries: list[Entry] = []
    offset = 0
    for name, tensor in bucket.weights:
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset))
        offset += -(-entries[-1].num_bytes // ALIGNMENT) * ALIGNMENT
    return entries, offset


def tensors_in(block: Tensor, entries: Sequence[Entry]) -> list[tuple[str, Tensor]]:
    """Look at the tensors of a uint8 block without copying them.

    Raises:
        RolloutError: If a tensor would end behind the block.
    """
    found = []
    for entry in entries:
        end = entry.offset + entry.num_bytes
        if end > block.numel():
            raise RolloutError(
                f"weight sync: {entry.name} ends at byte {end}, the block has {block.numel()}; "
                "it was cut short"
            )
        raw = block[entry.offset : end]
        found.append((entry.name, raw.view(getattr(torch, entry.dtype)).view(entry.shape)))
    return found


def fill(block: Tensor, bucket: WeightBucket, entries: Sequence[Entry], kind: str) -> dict[str, str]:
    """Copy a bucket into a block; return the checksum of each tensor as the trainer has it."""
    sums = {}
    for (name, tensor), (_, place) in zip(bucket.weights, tensors_in(block, entries), strict=True):
        if kind == "xxh3":
            sums[name], _ = copy_checked(place.view(-1), tensor.cpu().reshape(-1), kind)
        else:
            place.copy_(tensor)
            sums[name] = checksum(tensor, kind)
    return sums


def pack(bucket: WeightBucket, kind: str) -> tuple[bytes, dict[str, str]]:
    """Make the body of a request: length of the header, header in JSON, block. Also the checksums."""
    entries, num_bytes = layout(bucket)
    header = json.dumps([asdict(entry) for entry in entries]).encode()
    block = torch.zeros(num_bytes, dtype=torch.uint8)
    sums = fill(block, bucket, entries, kind)
    return len(header).to_bytes(HEADER_BYTES, "little") + header + block.numpy().tobytes(), sums


def unpack(body: bytes) -> list[tuple[str, Tensor]]:
    """Read what `pack` made.

    Raises:
        RolloutError: If the body is cut short.
    """
    start = HEADER_BYTES + int.from_bytes(body[:HEADER_BYTES], "little")
    if len(body) < start:
        raise RolloutError(f"weight sync: a body of {len(body)} bytes is too short for its header of {start}")
    entries = [Entry.from_json(values) for values in json.loads(body[HEADER_BYTES:start])]
    block = torch.frombuffer(bytearray(body), dtype=torch.uint8, offset=start) if len(body) > start else None
    return tensors_in(torch.zeros(0, dtype=torch.uint8) if block is None else block, entries)


class SharedBlock:
    """Memory under a name that another process of this machine can map: a file in /dev/shm.

    It is locked as long as its process lives. Those that killed processes left behind are removed first.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self._handle, name = tempfile.mkstemp(prefix=PREFIX, dir=MEMORY)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        self.path = Path(name)
        self.block = torch.zeros(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> Tensor:
        """Return uint8 of at least that size; what it held before is gone."""
        if self.block.numel() < num_bytes:
            os.truncate(self.path, num_bytes)
            self.block = map_block(self.path, num_bytes)
        return self.block

    def close(self) -> None:
        """Remove the name; the memory goes when nobody maps it any more."""
        if self._handle >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1


def _remove_abandoned() -> None:
    """Remove files whose process is gone: nobody holds their lock, and they are not just being made."""
    for path in MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or removed in between
            if time.time() - path.stat().st_ctime < YOUNG_S:
                continue
            handle = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


def map_block(path: Path, num_bytes: int) -> Tensor:
    """Map a file as uint8 (num_bytes,), shared with whoever maps it too.

    Raises:
        RolloutError: If it is no file that `SharedBlock` made, or shorter, since reading behind its end would
            kill the process.
    """
    if path.parent != MEMORY or not path.name.startswith(PREFIX):
        raise RolloutError(f"{path}: weights are shared as {MEMORY / PREFIX}*, this is no such file")
    found = path.stat().st_size if path.is_file() else -1
    if found < num_bytes:
        raise RolloutError(
            f"{path}: {'no such file' if found < 0 else f'{found} bytes'}, the trainer says {num_bytes}; "
            "trainer and engine do not share this memory, so send the weights over HTTP (shared_memory=False)"
        )
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
