"""Copies to a device that run late: nothing that they read or write is used again too early."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from datapipe import LoaderError
from datapipe.batch_stages import ToDevice, on_device
from datapipe.collate import Batch, as_tensor, pad_tokens
from datapipe.device import DeviceCopier, cuda_device
from datapipe.draft import Draft
from datapipe.ring import BufferRing


@dataclass
class LateStreams:
    """A device that copies only when somebody waits for it, as late as a real one may."""

    queue: list[Callable[[], object]] = field(default_factory=list)
    num_done: int = 0
    waited: list[int] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    is_inside: bool = False

    @contextlib.contextmanager
    def copies(self) -> Iterator[None]:
        self.is_inside = True
        yield
        self.is_inside = False

    def copy(self, tensor: Tensor) -> Tensor:
        assert self.is_inside
        target = torch.empty_like(tensor)
        # By address, as a device reads: a copy does not keep its source alive.
        source = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
        goal = target.numpy().reshape(-1).view(np.int8)
        self.queue.append(lambda: np.copyto(goal, np.ctypeslib.as_array(source)))
        return target

    def mark(self) -> int:
        assert self.is_inside
        return len(self.queue)

    def synchronize(self, mark: int) -> None:
        for number in range(self.num_done, mark):
            self.queue[number]()
        self.num_done = max(self.num_done, mark)

    def wait(self, mark: int) -> None:
        self.waited.append(mark)
        self.synchronize(mark)

    def keep(self, tensor: Tensor) -> None:
        assert self.waited
        self.kept.append(tensor)


def test_host_memory_is_not_lent_again_before_its_copy_is_done() -> None:
    streams, ring = LateStreams(), BufferRing(num_kept=8)
    copier = DeviceCopier(streams)
    under_way = []
    for number in range(6):
        host = ring.lend((1000,), np.int64)
        host[:] = number
        under_way.append(copier.begin([as_tensor(host)]))
        del host
        assert ring.num_lent == min(number + 1, 2)  # two copies are under way, no more
        assert streams.num_done == max(0, number - 1)
    for number, in_flight in enumerate(under_way):
        (tensor,) = copier.hand_out(in_flight)
        assert tensor.unique().tolist() == [number]
    assert [id(tensor) for tensor in streams.kept] == [id(one.tensors[0]) for one in under_way]
    assert streams.waited == [1, 2, 3, 4, 5, 6]
    copier.close()
    assert ring.num_lent == 0


def test_closing_waits_for_what_is_under_way() -> None:
    streams = LateStreams()
    copier = DeviceCopier(streams)
    copier.begin([torch.ones(3), torch.ones(2)])
    assert streams.num_done == 0
    copier.close()
    assert streams.num_done == 2


def test_all_tensors_of_a_batch_go_and_keep_their_places() -> None:
    streams = LateStreams()
    copier = DeviceCopier(streams)
    draft = Draft(rows=np.array([3, 4]), size=None, seed=0, epoch=0, ring=BufferRing(num_kept=1))
    draft.batch = Batch(
        rows=draft.rows,
        read_keys=["a", "b"].copy,
        images=torch.full((2, 3), 1.0),
        tensors={"codes": torch.full((2, 4), 2), "clips": torch.full((2,), 3)},
        columns={"caption": ["x", "y"]},
        tokens={"caption": pad_tokens([np.array([7]), np.array([8, 9])], pad_id=0, multiple_of=1)},
    )
    (piece,) = draft.pieces(1)
    piece.collated.append(draft)
    ToDevice(copier)(piece)
    assert draft.in_flight is not None
    moved = on_device(draft.batch, copier.hand_out(draft.in_flight))
    assert len(streams.kept) == 6
    assert moved.images is not None and torch.equal(moved.images, torch.full((2, 3), 1.0))
    assert {name: tensor.unique().tolist() for name, tensor in moved.tensors.items()} == {
        "codes": [2],
        "clips": [3],
    }
    tokens = moved.tokens["caption"]
    assert tokens.ids.tolist() == [[7, 0], [8, 9]] and tokens.lengths.tolist() == [1, 2]
    assert tokens.mask.tolist() == [[True, False], [True, True]]
    assert moved.keys == ["a", "b"] and moved.columns == {"caption": ["x", "y"]}


def test_devices_that_are_not_there_are_refused() -> None:
    assert cuda_device(None) is None and cuda_device("cpu") is None
    with pytest.raises(LoaderError, match="device is meta; the loader copies to CUDA devices only"):
        cuda_device("meta")
    with pytest.raises(LoaderError, match=r"device is cuda:99, this machine has \d+ CUDA devices"):
        cuda_device("cuda:99")
