"""Checksums of weights, equal on both sides of a transfer, and copies that are checked as they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

__all__ = ["CHECKSUMS", "checksum", "checksum_kind", "copy_checked"]

BLOCK_BYTES = 1 << 18
"""Copied and summed before it leaves the core's cache."""
WORDS = 1 << 22
"""Summed at once on a GPU."""


def checksum_kind(device: torch.device) -> str:
    """Name of the checksum that is cheap on a device."""
    return "xxh3" if device.type == "cpu" else "words"


def checksum(tensor: Tensor, kind: str) -> str:
    """Sum a contiguous tensor's bytes; equal bytes give equal results on every device.

    Args:
        tensor: Any dtype, contiguous.
        kind: A key of `CHECKSUMS`.
    """
    return CHECKSUMS[kind](tensor)


def copy_checked(target: Tensor, source: Tensor, kind: str) -> tuple[str, str]:
    """Copy equal, contiguous tensors and sum both; return the checksums of source and target.

    On a CPU each block is summed on both sides while it is in the cache, so the memory is passed once.
    """
    if kind != "xxh3" or target.device.type != "cpu" or source.device.type != "cpu":
        target.copy_(source)
        return checksum(source, kind), checksum(target, kind)
    read, written = _bytes(source), _bytes(target)
    sent, held = xxhash.xxh3_64(), xxhash.xxh3_64()
    for start in range(0, len(read), BLOCK_BYTES):
        block, place = read[start : start + BLOCK_BYTES], written[start : start + BLOCK_BYTES]
        np.copyto(place, block)
        sent.update(block.data)
        held.update(place.data)
    return sent.hexdigest(), held.hexdigest()


def _xxh3(tensor: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(_bytes(tensor.cpu()).data)


def _words(tensor: Tensor) -> str:
    """Two sums modulo 2^64 over 16-bit words, plain and weighted by place, computed where the tensor is."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    tail = raw[raw.numel() // 2 * 2 :].to(torch.int64)
    words = raw[: raw.numel() // 2 * 2].view(torch.int16)
    plain = weighted = 0
    for start in range(0, words.numel(), WORDS):
        part = words[start : start + WORDS].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        plain += int(part.sum())
        weighted += int((part * place).sum())
    for value in tail.tolist():
        plain, weighted = plain + value, weighted + value * (words.numel() + 1)
    return f"{plain % 2**64:016x}{weighted % 2**64:016x}"


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


CHECKSUMS: Mapping[str, Callable[[Tensor], str]] = {"xxh3": _xxh3, "words": _words}
