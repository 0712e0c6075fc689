"""Batches on their way to a GPU: out of pinned memory, on a stream of their own, while the last one is used.

`CudaStreams` is all that touches CUDA; the rest runs, and is tested, without a GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from datapipe.errors import LoaderError

__all__ = ["CudaStreams", "DeviceCopier", "InFlight", "Streams", "cuda_device"]

_DEPTH: Final = 2


class Streams(Protocol):
    """What a device has to offer: a stream for copies, marks on it, and the stream of the caller."""

    def copies(self) -> AbstractContextManager[Any]:
        """Inside, work of this thread goes to the stream of the copies."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy to the device. The source must stay as it is until a later mark is reached."""

    def mark(self) -> Any:
        """A mark behind all that was begun on the stream of the copies."""

    def synchronize(self, mark: Any) -> None:
        """Wait in this thread until a mark is reached."""

    def wait(self, mark: Any) -> None:
        """Let the caller's stream wait until a mark is reached; this thread goes on."""

    def keep(self, tensor: Tensor) -> None:
        """Memory of a tensor is not to be used again before the caller's stream is done with it."""


class InFlight:
    """Tensors of one batch that are being copied, and the mark behind them."""

    __slots__ = ("mark", "tensors")

    def __init__(self, tensors: list[Tensor], mark: Any) -> None:
        self.tensors = tensors
        self.mark = mark


class DeviceCopier:
    """Copies batches one after the other; two of them are under way at most.

    The host memory of a copy stays referenced until its mark is reached, so that the ring it came from does
    not lend it before.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._under_way: deque[tuple[Any, Sequence[Tensor]]] = deque()
        self._lock = threading.Lock()

    def begin(self, tensors: Sequence[Tensor]) -> InFlight:
        """Begin to copy the tensors of a batch; called by the stage's worker."""
        with self._lock:
            while len(self._under_way) >= _DEPTH:
                self._streams.synchronize(self._under_way[0][0])
                self._under_way.popleft()
            with self._streams.copies():
                copied = [self._streams.copy(tensor) for tensor in tensors]
                mark = self._streams.mark()
            self._under_way.append((mark, tensors))
        return InFlight(copied, mark)

    def hand_out(self, in_flight: InFlight) -> list[Tensor]:
        """The tensors, for use on the stream that is current in the calling thread."""
        self._streams.wait(in_flight.mark)
        for tensor in in_flight.tensors:
            self._streams.keep(tensor)
        return in_flight.tensors

    def close(self) -> None:
        """Wait for the copies that are under way, and let go of their host memory."""
        with self._lock:
            while self._under_way:
                self._streams.synchronize(self._under_way[0][0])
                self._under_way.popleft()


class CudaStreams:
    """Streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copies(self) -> AbstractContextManager[Any]:
        # Sets the current device of the thread too, which is 0 in a new thread.
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def copy(self, tensor: Tensor) -> Tensor:
        # Allocated on the stream of the copies: the memory may have been used there, and nowhere else.
        return tensor.to(self._device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def synchronize(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


def cuda_device(device: torch.device | str | None) -> torch.device | None:
    """The device to copy to; None where batches stay in the memory of the host.

    Raises:
        LoaderError: For a device that is neither `cpu` nor a CUDA device that is there.
    """
    try:
        wanted = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise LoaderError(f"device is {device!r}, wanted 'cuda', 'cuda:0' or None: {error}") from error
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise LoaderError(
            f"device is {wanted}; the loader copies to CUDA devices only, leave it out and move "
            f"batches yourself"
        )
    if not torch.cuda.is_available() or (wanted.index or 0) >= torch.cuda.device_count():
        raise LoaderError(
            f"device is {wanted}, this machine has {torch.cuda.device_count()} CUDA devices; leave it out to "
            f"get batches in the memory of the host"
        )
    return wanted if wanted.index is not None else torch.device("cuda", torch.cuda.current_device())
