"""A decoder's own copies of a policy's weights, each compared with its source as it is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from unirl.errors import RolloutError
from unirl.policies.sharded_tensors import whole
from unirl.rollout.compared_copies import copy_compared, same_bytes

__all__ = ["WeightCopies"]

BUCKET_BYTES = 256 << 20
"""Of gathered or merged weights that are held at a time; threads wait for each other between buckets."""


class WeightCopies:
    """Places for the tensors of a checkpoint, kept from sync to sync.

    Args:
        places: Contiguous tensors on one device, by the names of a checkpoint. Of two names of one place, as
            of a tied head, the second is only compared, and need not come.
    """

    def __init__(self, places: Mapping[str, Tensor]) -> None:
        self.places = dict(places)
        """By name."""
        owners: dict[int, str] = {}
        for name, place in self.places.items():
            owners.setdefault(place.data_ptr(), name)
        self._owners = frozenset(owners.values())
        self.num_tensors = self.num_bytes = 0
        """That came with the last load."""

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors to their places, and compare every byte of both sides.

        Args:
            weights: By name, on any device and in any dtype. Sharded ones are gathered about 256 MB at a
                time, so every rank must call this.

        Raises:
            RolloutError: If a tensor has no place or another shape than its place, if a place got none, or if
                one holds other bytes afterwards. The tensor is named.
        """
        missing, self.num_tensors, self.num_bytes = set(self._owners), 0, 0
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for bucket in self._buckets(weights):
                wrong = self._copy(pool, bucket)
                if wrong:
                    raise _other_bytes(wrong[0])
                self.num_tensors += len(bucket)
                self.num_bytes += sum(tensor.nbytes for _, tensor in bucket)
                missing.difference_update(name for name, _ in bucket)
        if missing:
            raise RolloutError(
                f"{len(missing)} weights were not given, the first is {sorted(missing)[0]}; "
                "sync the whole model"
            )

    @torch.no_grad()
    def require_same(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Compare what is held with what `load` would be given.

        Raises:
            RolloutError: With the first tensor that differs.
        """
        for bucket in self._buckets(weights):
            for name, tensor in bucket:
                if not same_bytes(self.places[name], tensor):
                    raise _other_bytes(name)

    def _buckets(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole tensors that have a place, as the place would hold them."""
        held: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name, tensor in weights:
            place = self.places.get(name)
            if place is None:
                raise RolloutError(
                    f"{name}: the decoder has no such weight; its names are those of the model"
                )
            if place.shape != tensor.shape:
                raise RolloutError(
                    f"{name}: shape {tuple(tensor.shape)}, the decoder has {tuple(place.shape)}; "
                    "make a new engine for a model of another size"
                )
            held.append((name, whole(tensor).detach().to(place).contiguous()))
            num_bytes += held[-1][1].nbytes
            if num_bytes >= BUCKET_BYTES:
                yield held
                held, num_bytes = [], 0
        yield held

    def _copy(self, pool: ThreadPoolExecutor, bucket: Sequence[tuple[str, Tensor]]) -> list[str]:
        """Copy each tensor to its place; the names of those whose places then hold other bytes."""
        copied = [pair for pair in bucket if pair[0] in self._owners]
        copied.sort(key=lambda pair: -pair[1].nbytes)
        # Each thread has its share at once: to hand over tensor by tensor takes as long as to compare them.
        num_threads = torch.get_num_threads()
        shares = [copied[start::num_threads] for start in range(num_threads)]
        # A GPU copies on the stream of the thread that asks.
        run = pool.map if all(tensor.device.type == "cpu" for _, tensor in copied) else map
        wrong = [name for names in run(self._copy_share, shares) for name in names]
        # A second name is compared with what its place holds now.
        seconds = ((name, tensor) for name, tensor in bucket if name not in self._owners)
        return wrong + [name for name, tensor in seconds if not same_bytes(self.places[name], tensor)]

    def _copy_share(self, share: Sequence[tuple[str, Tensor]]) -> list[str]:
        return [name for name, tensor in share if not copy_compared(self.places[name], tensor)]


def _other_bytes(name: str) -> RolloutError:
    return RolloutError(
        f"weight sync: the decoder holds other bytes for {name} than the policy; it would sample from "
        "another policy. A tied pair whose tensors differ, and a decoder that somebody wrote to, are the "
        "usual causes"
    )
