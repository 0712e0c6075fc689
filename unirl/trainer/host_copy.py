"""Tensors copied into one reused block of host memory, laid out as the safetensors file they end in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import xxhash
from torch import Tensor

__all__ = ["DTYPES", "Fingerprint", "HostCopy"]

Fingerprint = dict[str, int | str]
"""`bytes` and `xxh3_128` of a file."""
DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls them."""
BLOCK_BYTES = 1 << 22


class HostCopy:
    """Copies tensors while training waits, and writes them as one file while it goes on.

    Source of the layout: safetensors' own description of its format (length of the header, header, data
    without holes).
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._header = b""
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._header) + self._num_bytes

    def take(self, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> None:
        """Copy tensors off their device; what was copied before is gone.

        Args:
            tensors: On any device. Wide types come first in the file, so that each is aligned.
            metadata: Goes into the header.
        """
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name in names:
            tensor, start = tensors[name], end
            end = start + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header, self._num_bytes = len(text).to_bytes(8, "little") + text, end
        on_device = any(tensor.is_cuda for tensor in tensors.values())
        if len(self._buffer) < end:
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=on_device)
        with _side_stream() if on_device else nullcontext():
            start = 0
            for name in names:
                tensor = tensors[name].detach()
                end = start + tensor.numel() * tensor.element_size()
                # A view of another type needs an aligned start, which the order of the names sees to.
                target = self._buffer[start:end].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor, non_blocking=on_device)
                start = end

    def fingerprint(self) -> Fingerprint:
        """Size and checksum of the file, which need not be written."""
        digest = xxhash.xxh3_128()
        for block in self._blocks():
            digest.update(block)
        return {"bytes": self.num_bytes, "xxh3_128": digest.hexdigest()}

    def write(self, path: Path) -> Fingerprint:
        """Write the file and see it to the disk; the size and checksum are those of what was meant.

        Raises:
            OSError: If it cannot be written.
        """
        digest = xxhash.xxh3_128()
        with path.open("wb") as file:
            for block in self._blocks():
                file.write(block)
                digest.update(block)
            file.flush()
            os.fsync(file.fileno())
        return {"bytes": self.num_bytes, "xxh3_128": digest.hexdigest()}

    def _blocks(self) -> Iterator[bytes | memoryview]:
        yield self._header
        data = self._buffer.numpy().data[: self._num_bytes]
        for start in range(0, self._num_bytes, BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]


@contextmanager
def _side_stream() -> Iterator[None]:
    """Copies of the block run beside the work that is queued later, and are done when it ends."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
